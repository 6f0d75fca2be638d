"""``plan_program``: a static program, rewritten in place so that its step keeps a byte budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import paddle

from remat.core.budget import format_bytes
from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.fit.request import Request
from remat.paddle.candidate import ProgramCandidate, ProgramPlan
from remat.paddle.first_step import FirstStep
from remat.paddle.sequential import mark, refuse_if_run
from remat.paddle.trace import op_facts
from remat.paddle.trace.program import trace_program
from remat.paddle.trace.sizes import Sizes
from remat.running.cost_model import device_here, get_profile

_log = logging.getLogger("remat")


def plan_program(
    program: Any = None,
    budget: int | str | None = None,
    *,
    plan: Plan | None = None,
    checkpoints: Sequence[Any] | None = None,
    batch_size: int | None = None,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    fetch_list: Sequence[Any] = (),
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    strict: bool = False,
    **options: Any,
) -> ProgramPlan:
    """Plan a static program within a byte budget, and rewrite it so that ``Executor.run`` keeps to it.

    Call this once, after ``minimize`` or ``append_backward`` and before the first ``exe.run`` of the program::

        loss = model(x)
        paddle.optimizer.Adam().minimize(loss)
        plan = remat.paddle.plan_program(main, "60%", batch_size=64, fetch_list=[loss])

    Operators that run again are copied into the block; every executor then runs this one program in the order of its
    block. Dropout repeats by the mask that it drew, and a batch normalisation moves its statistics once.

    Args:
        program: with forward and backward operators, and the update if it has one; None for the default main program.
        budget: peak bytes of the step, everything counted that the program reads or makes (parameters, optimizer
            state, batch, gradients and all between): an int, "4GiB", or "60%" of the plain program's own peak, which
            is also the default.
        plan: a plan made earlier for the same program, loaded from a file say, instead of a budget.
        checkpoints: values of the program to keep, or names of inputs and parameters, instead of a budget; all else
            is recomputed.
        batch_size: what an open first dimension of an input (``None`` or -1) is in a step.
        feed_shapes: shapes of inputs by name, where more than the first dimension is open.
        fetch_list: values that every step fetches; they live to its end.
        resident_bytes: memory that counts although the program does not touch it.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".
        strict: raise an error, from the first ``exe.run``, where that takes more than the budget by over 1 %; else this
            is logged as a warning. On a CPU only; on a GPU nothing is measured.
        **options: passed on to the planner.

    Returns:
        The plan that the program now follows. Its ``measured_peak_bytes`` is what the first ``exe.run`` took.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if no schedule fits; it names the smallest budget. The program is then as it was.
        PlanMismatch: where ``plan`` is for another program; with ``strict``, from the first ``exe.run``.
        TypeError: for what is no program, and for checkpoints or fetches that are no lists of values or names.
        UnsupportedStep: for a program that was run or planned before, without a backward pass, or of unknown sizes; for
            values of another program.
        ValueError: for more than one of a budget, a plan and checkpoints.
    """
    program = paddle.static.default_main_program() if program is None else program
    if not isinstance(program, paddle.static.Program):
        raise TypeError(
            f"plan_program takes a paddle.static.Program, not {type(program).__name__}; the program of a loss is "
            "loss.block.program, and for a layer in an ordinary loop there is remat.paddle.limit_memory"
        )
    request = Request(budget, plan, checkpoints, planner, time_limit_s, options)
    request = request.check("remat.paddle.plan_program", takes_auto=False)
    if not request.plans:
        request = Request("60%", planner=planner, time_limit_s=time_limit_s, options=options)
    refuse_if_run(program)
    if not any(op_facts.is_gradient(op) for op in program.global_block().ops):
        raise UnsupportedStep(
            f"this program of {len(program.global_block().ops)} operators has no backward pass, so there is nothing to "
            "recompute for; call minimize(loss) or paddle.static.append_backward(loss) first"
        )
    kept = values_of(program, checkpoints or (), "checkpoints")
    fetched = values_of(program, fetch_list, "fetch_list")
    profile = get_profile(device or device_here("cpu"))
    traced = trace_program(program, profile, Sizes(program, feed_shapes, batch_size), kept=fetched)
    candidate = ProgramCandidate(traced, resident_bytes)
    found = candidate.planned(request, kept)
    copies = candidate.carry_out(found)
    pinned = [traced.graph.tensors[number] for number in traced.graph.inputs]
    there_bytes = sum(t.size_bytes for t in pinned if t.role != "batch")
    batch_bytes = {t.name: t.size_bytes for t in pinned if t.role == "batch"}
    mark(program, found, FirstStep(found, 0, resident_bytes + there_bytes, strict=strict), batch_bytes)
    _log.info(
        "Planned a program of %d operators: %d copies, peak %s of %s plain.",
        len(traced.graph.ops),
        copies,
        format_bytes(found.peak_bytes),
        format_bytes(found.baseline_peak_bytes),
    )
    return found


_NAME: Final = "remat_name"
"""The attribute of an operator that holds the name which a user gave to its first result."""


def named(value: Any, name: str) -> Any:
    """Give a value of a static program a name, for checkpoints that are named: values of Paddle 3 have none.

    Args:
        value: the first result of an operator, as a layer returns it.
        name: any text.

    Returns:
        The value.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(value, paddle.pir.Value):
        raise TypeError(f"named takes a value of a static program, as a layer returns it, not {type(value).__name__}")
    value.get_defining_op().set_str_attr(_NAME, name)
    return value


def values_of(program: Any, wanted: Any, argument: str) -> list[Any]:
    """The values of a program that a user means: the values themselves, or names of inputs and parameters.

    Args:
        program: that the values are of.
        wanted: the values or names, in a list.
        argument: what the user calls them.

    Raises:
        TypeError: for no list, and for what is neither a value nor a name.
        UnsupportedStep: for a name that the program does not have, and for a value of another program.
    """
    if not isinstance(wanted, list | tuple):
        raise TypeError(
            f"{argument} takes a list of values or names, not {type(wanted).__name__}; write {argument}=[...]"
        )
    own = {value.id for op in program.global_block().ops for value in op.results() if value.initialized()}
    found = []
    for one in wanted:
        if not isinstance(one, str | paddle.pir.Value):
            raise TypeError(f"{argument} takes values of the program or names, not {type(one).__name__} ({one!r})")
        value = _value_of_name(program, one) if isinstance(one, str) else one
        if value.id not in own:
            raise UnsupportedStep(
                f"a value in {argument} (shape {list(value.shape)}) is none of this program; give what the layers "
                "returned while this program was built"
            )
        found.append(value)
    return found


def _value_of_name(program: Any, name: str) -> Any:
    known: dict[str, Any] = {}
    for op in program.global_block().ops:
        attributes = op.attrs()
        for key in (_NAME, "name", "parameter_name", "output_name"):
            if isinstance(attributes.get(key), str):
                known[attributes[key]] = [*op.results(), *op.operands_source()][0]
    if name not in known:
        # Those that the user gave come first; an optimizer's state has names by the hundred.
        named = sorted(known, key=lambda one: (not known[one].get_defining_op().has_attr(_NAME), one))
        raise UnsupportedStep(
            f"the program has no value of the name {name!r} (named are: {', '.join(named[:8]) or 'none'}); "
            "since Paddle 3 only inputs, parameters and outputs have names: give the value itself, as the layer "
            "returned it, or name it with remat.paddle.named(value, name)"
        )
    return known[name]
