"""The cases in PyTorch: eager plans, graph mode, and ``torch.compile`` within a budget."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch._functorch.config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import remat
import remat.torch
from benchmarks.gpu import laptop, room, training
from benchmarks.gpu.cases import DTYPES, MODELS, SHARES, UNTIMED, Case, speed_of
from benchmarks.gpu.library import library_step, limited
from benchmarks.gpu.torch_models import Step, step_of
from benchmarks.torch_host import table as host_table
from benchmarks.zoo.frame.listening import listening
from remat.running.calibration import op_samples
from remat.running.cost_model import calibrate
from remat.torch.timed_ops import TimedOps
from remat.torch.trace.fake_step import record_step
from remat.torch.trace.trace import traced_step

Line = dict[str, Any]
SEED = 17
TURNS = 5
TIME_LIMIT_S = 4
"""Seconds of one round of planning."""


def run(case: Case, device: str, small: bool) -> Iterator[Line]:
    """The lines of one case, each as soon as it is known."""
    if case.part == "host":
        yield from host_table(device)
    elif case.part == "laptop":
        yield from laptop.lines(device, small)
    elif case.part == "calibration":
        yield from calibration(device, small)
    elif case.part == "training":
        yield from training.lines(case.model, case.dtype, device, small)
    elif case.part == "room":
        yield from room.lines(runs_of(case, device, small))
    elif case.part == "peers":
        yield from peers(case, device, small)
    else:
        yield from budgets(case, device, small)


def budgets(case: Case, device: str, small: bool) -> Iterator[Line]:
    """Plain, plain once more (what of a difference is the kernels' own), and shares of its measured peak."""
    if case.part in UNTIMED:  # What libraries call has no such kernel everywhere: plain steps that differ say so.
        torch.use_deterministic_algorithms(True, warn_only=case.part == "library")
    if case.part == "library":
        step = library_step(case.model, device, small)
    else:
        step = step_of(case.model, case.dtype, device, small)
    bench = Bench(step, device, is_timed=case.part not in UNTIMED)
    plain = compiled_plain(case.engine, step)
    line = bench.line("plain", plain)
    yield line
    yield bench.line("plain again", plain)
    shares = SHARES[case.part]
    budgets_bytes: list[tuple[str, int]] = [(f"{share:.0%}", int(share * line["peak_bytes"])) for share in shares]
    for name, budget in [*budgets_bytes, ("smallest", 1)]:
        yield planned_line(bench, case.engine, f"remat, {name}", budget, smallest=name == "smallest")


def runs_of(case: Case, device: str, small: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """The plain step and planned ones: what they are called, their peaks in bytes, and what runs them."""
    step = step_of(case.model, case.dtype, device, small)
    bench = Bench(step, device, is_timed=False)
    plain_bytes = bench.line("plain", step)["peak_bytes"]
    yield "plain", plain_bytes, partial(bench.run_and_forget, step)
    for name, budget in (
        *((f"remat, {s:.0%}", int(s * plain_bytes)) for s in SHARES[case.part]),
        ("remat, smallest", 1),
    ):
        found, least = planned_or_refused("graph", step, budget)
        if found is None and budget == 1:
            found, _ = planned_or_refused("graph", step, least)
        if found is not None:
            yield name, bench.line(name, found[0])["peak_bytes"], partial(bench.run_and_forget, found[0])


def peers(case: Case, device: str, small: bool) -> Iterator[Line]:
    """What PyTorch ships, and remat in the same bytes."""
    step = step_of(case.model, case.dtype, device, small)
    bench = Bench(step, device)
    yield bench.line("plain", compiled_plain(case.engine, step))
    for name, make in peers_of(case, device, small):
        try:
            line = bench.line(name, make())  # Its weights are let go of before the plan runs.
        except Exception as error:  # A peer's failure is a line of the table.
            yield failed(name, error)
            continue
        yield line
        yield planned_line(bench, case.engine, f"remat, bytes of {name}", line["peak_bytes"])


def peers_of(case: Case, device: str, small: bool) -> Iterator[tuple[str, Callable[[], Step]]]:
    """The peers of an engine: what makes them, each with weights of its own that are equal to the plain ones."""
    make = partial(step_of, case.model, case.dtype, device, small)
    if case.engine == "compiled":
        for ratio in (0.5, 0.2):
            with torch._functorch.config.patch(activation_memory_budget=ratio):
                yield f"activation_memory_budget {ratio}", lambda: compiled_plain(case.engine, make())
        return
    for name, wrap in (("torch.utils.checkpoint, each block", whole_block), ("selective, products kept", selective)):
        yield name, partial(make, wrap)


def whole_block(block: torch.nn.Module) -> Callable[..., Any]:
    return partial(checkpoint, block, use_reentrant=False)


def selective(block: torch.nn.Module) -> Callable[..., Any]:
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}
    products |= {
        getattr(aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
    }

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if func in products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, block, use_reentrant=False, context_fn=contexts)


def planned_line(bench: Bench, engine: str, name: str, budget: int, *, smallest: bool = False) -> Line:
    """The step within a budget; an infeasible one is a line that names the smallest."""
    started = time.perf_counter()
    try:
        with listening() as said:
            found, least = planned_or_refused(engine, bench.step, budget)
            if found is None and smallest:
                budget = least
                found, least = planned_or_refused(engine, bench.step, budget)
            if found is None:
                return {"name": name, "budget_bytes": budget, "error": "refused", "smallest_bytes": least}
            ours, plan_of = found
            planning_s = time.perf_counter() - started
            line = bench.line(name, ours)
    except Exception as error:
        return failed(name, error)
    plan = plan_of()
    return {
        **line,
        "budget_bytes": budget,
        "predicted_bytes": plan.peak_bytes,
        "predicted_time": 1 + plan.overhead,
        "recomputed": plan.recomputed,
        "planning_s": planning_s,
        "mode": plan.mode,
        "said": " ".join(said),
    }


Planned: TypeAlias = tuple[Step, Callable[[], Any]]
"""A step within a budget, planned already, and a function that returns its plan."""


def planned_or_refused(engine: str, step: Step, budget: int) -> tuple[Planned | None, int]:
    """The step within a budget, and that; for one that is too small None and the smallest.

    Nothing of a refused plan is left when this returns: an error holds what its frames held, on the device, too.
    """
    try:
        return planned(engine, step, budget), budget
    except remat.InfeasibleBudget as error:
        return None, error.minimum_bytes


def planned(engine: str, step: Step, budget: int) -> Planned:
    """The step within a budget.

    Raises:
        InfeasibleBudget: if none fits.
    """
    if engine == "eager":
        plan = remat.torch.plan(step.loss, *step.args, budget=budget, time_limit_s=TIME_LIMIT_S)
        applied = remat.torch.apply(plan)

        def loss(*args: Any) -> Any:
            with applied:
                return step.loss(*args)

        return replace(step, loss=loss), lambda: plan
    if engine == "limit":
        found, ours = limited(step, budget)
        return found, lambda: ours.plans[-1]
    chosen = {"backend": "aten"} if engine == "graph" else {}
    ours = remat.torch.compile(step.loss, budget=budget, time_limit_s=TIME_LIMIT_S, **chosen)
    ours(*step.args).backward()
    for parameter in step.parameters:
        parameter.grad = None
    return replace(step, loss=ours), lambda: ours.plan


def compiled_plain(engine: str, step: Step) -> Step:
    """The plain step as an engine runs it."""
    if engine != "compiled":
        return step
    return replace(step, loss=torch.compile(step.loss, fullgraph=True, dynamic=False))


class Bench:
    """Measures steps of one model beside the first of them, which is the plain one.

    Args:
        step: whose weights and batch the planned steps have.
        device: as PyTorch names it.
        is_timed: are steps timed?
    """

    def __init__(self, step: Step, device: str, *, is_timed: bool = True) -> None:
        self.step, self.device = step, device
        self._is_timed = is_timed
        self._plain: Step | None = None
        self._expected: list[torch.Tensor] = []

    def line(self, name: str, step: Step) -> Line:
        """Peak, time beside plain steps in turns, and the largest difference of a gradient from the plain one's.

        The peak is that of the step's own weights and batch; those of the plain step, where they are others, are not in
        it.
        """
        found = self._gradients(step)
        if self._plain is None:
            self._plain, self._expected = step, found
        plain = self._plain
        pairs = list(zip(found, self._expected, strict=True))
        difference = max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)
        peak = self._peak(step)
        equal_bits = all(torch.equal(a, b) for a, b in pairs)
        found_line = {"name": name, **peak, "difference": difference, "equal_bits": equal_bits}
        if self._is_timed:
            times = [(self._seconds(step), self._seconds(plain)) for _ in range(TURNS)]
            found_line["step_s"] = statistics.median(own for own, _ in times)
            found_line["relative_time"] = statistics.median(own / other for own, other in times)
        return found_line

    def _run(self, step: Step) -> None:
        torch.manual_seed(SEED)
        step.loss(*step.args).backward()
        self._wait()

    def run_and_forget(self, step: Step) -> None:
        """One step, without its gradients afterwards, also where it fails."""
        try:
            self._run(step)
        finally:
            self._forget(step)

    @staticmethod
    def _forget(step: Step) -> None:
        """Let go of the gradients, which would be in the way of another step."""
        for parameter in step.parameters:
            parameter.grad = None

    def _gradients(self, step: Step) -> list[torch.Tensor]:
        """On the host, so that they take no memory of the device."""
        self._run(step)
        found = [p.grad.detach().float().cpu() for p in step.parameters if p.grad is not None]
        self._forget(step)
        return found

    def _peak(self, step: Step) -> Line:
        if self.device == "cpu":
            return {"peak_bytes": remat.torch.measure(step.loss, *step.args, repeats=1).peak_bytes}
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._run(step)
        self._forget(step)
        beside = 0 if self._plain is None or step.parameters is self._plain.parameters else self._plain.own_bytes
        return {
            "peak_bytes": torch.cuda.max_memory_allocated() - beside,
            "requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.peak"] - beside,
            "reserved_bytes": torch.cuda.max_memory_reserved() - beside,
        }

    def _seconds(self, step: Step) -> float:
        started = time.perf_counter()
        self._run(step)
        spent_s = time.perf_counter() - started
        self._forget(step)
        return spent_s

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def calibration(device: str, small: bool) -> Iterator[Line]:
    """The device's speed, timed now, and each model's plain step as the cost model sees it with that."""
    profile = calibrate(op_samples(TimedOps()))
    yield speed_of(profile)
    for model in MODELS:
        for dtype in DTYPES:
            step = step_of(model, dtype, device, small)
            recording = record_step(step.loss, step.args, None)
            predicted_s = traced_step(recording, profile).graph.time_s
            yield {**Bench(step, device).line(f"{model} {dtype}", step), "predicted_step_s": predicted_s}


def failed(name: str, error: Exception) -> Line:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return {"name": name, "error": f"{type(error).__name__}: {said[0][:200]}"}
