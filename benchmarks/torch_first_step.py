"""How long the first call in graph mode takes, by part: ``python -m benchmarks.torch_first_step [MODEL BUDGET]``.

Transformers of 24 layers, each with each budget in a process of its own, on one thread; processor seconds, from the
call to its result. The modules have run once before, so that what a library imports at its first call does not count.
Writes ``benchmarks/results/torch-first-step.md``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from remat.running import machine

RESULT = Path(__file__).parent / "results" / "torch-first-step.md"
LAYERS, WIDTH, TOKENS = 24, 128, (4, 64)
BUDGETS = ("60%", "40%")
PARTS = ("Dynamo", "AOTAutograd", "the graph", "the plan", "the program", "its source", "the step")


def transformers_gpt2() -> Callable[[], Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=4, vocab_size=1024, n_positions=TOKENS[1]))
    ids = torch.randint(1024, TOKENS)
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def torch_encoder() -> Callable[[], Any]:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    model, x = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), torch.randn(*TOKENS, WIDTH)
    return lambda: model(x).square().mean()


MODELS = {"GPT-2 of transformers": transformers_gpt2, "torch.nn.TransformerEncoder": torch_encoder}


class Clock:
    """Processor seconds by part; a part that runs inside of another does not count there."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = ["Dynamo"]
        self._since = time.process_time()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to the part."""
        self._switch()
        self._inside.append(name)
        try:
            yield
        finally:
            self._switch()
            self._inside.pop()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted for the part."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return run

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._inside[-1]] += now - self._since
        self._since = now


def first_call(model: str, budget: str) -> dict[str, Any]:
    """Seconds of the first call by part, and its plan."""
    import torch

    import remat.torch
    from remat.torch.graph_mode import _aot, candidate, capture

    torch.set_num_threads(1)
    torch.manual_seed(0)
    loss_fn = MODELS[model]()
    loss_fn().backward()
    clock = Clock()

    def timed_function(*args: Any) -> Any:
        return clock.around("the step", function_of(*args))

    def traced_by(**options: Any) -> Any:
        return clock.around("AOTAutograd", aot_autograd(**options))

    aot_autograd, function_of = _aot.aot_autograd, clock.around("its source", capture.function_of)
    with contextlib.ExitStack() as stack:
        for owner, name, part in (
            (candidate.GraphCandidate, "__init__", "the graph"),
            (candidate.GraphCandidate, "fitted", "the plan"),
            (candidate.GraphCandidate, "program", "the program"),
        ):
            stack.enter_context(mock.patch.object(owner, name, clock.around(part, getattr(owner, name))))
        stack.enter_context(mock.patch.object(capture, "function_of", timed_function))
        stack.enter_context(mock.patch.object(_aot, "aot_autograd", traced_by))
        limited = remat.torch.compile(loss_fn, budget=budget, backend="aten")
        clock._since = started = time.process_time()
        wall = time.perf_counter()
        limited()
        wall = time.perf_counter() - wall
        total = time.process_time() - started
        with clock.part("after the call"):
            pass
    plan = limited.plan
    seconds = {part: clock.seconds[part] for part in PARTS}
    return {
        "model": model,
        "budget": budget,
        "total_s": total,
        "wall_s": wall,
        "seconds": seconds,
        "ops": len(plan.graph.ops),
        "overhead": plan.overhead,
        "share": plan.peak_bytes / plan.baseline_peak_bytes,
    }


def written(lines: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    where = machine.described()
    text = [
        f"# The first call in graph mode: Transformers of {LAYERS} layers of {WIDTH}, {TOKENS[0]} x {TOKENS[1]} tokens",
        "",
        f"{where['system']} {where['processor']}, {where['cores']} cores; processor seconds of one thread, by part.",
        "",
        f"| model | ops | budget | first call | {' | '.join(PARTS)} | predicted extra time |",
        f"|---|---|---|---|{'---|' * len(PARTS)}---|",
    ]
    for line in lines:
        parts = " | ".join(f"{line['seconds'][part]:.1f}" for part in PARTS)
        text.append(
            f"| {line['model']} | {line['ops']:,} | {line['budget']} | {line['total_s']:.1f} | {parts} | "
            f"{100 * line['overhead']:.1f} % |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    if len(sys.argv) > 2:
        print(json.dumps(first_call(*sys.argv[1:3])))
        return
    lines = []
    for model in MODELS:
        for budget in BUDGETS:
            command = [sys.executable, "-m", "benchmarks.torch_first_step", model, budget]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            lines.append(json.loads(done.stdout.splitlines()[-1]))
            print(written(lines[-1:]).splitlines()[-1], flush=True)
    RESULT.write_text(written(lines))


if __name__ == "__main__":
    main()
