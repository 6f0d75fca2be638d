"""What is measured: one case is one model in one framework, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from remat.running.cost_model import DeviceProfile

PARTS: Final = {
    "exact": "with kernels that always give the same numbers: are those of planned steps equal to the bit?",
    "budgets": "plain, then planned to shares of it: exactness, predicted and measured bytes and time",
    "library": "models that we did not write: what their peaks are under limit_memory and under apply; no times",
    "training": "whole steps of AdamW under autocast, after four of them; is every weight equal to the bit?",
    "room": "how much of the device a step needs, with what the allocator cannot hand out",
    "peers": "what the frameworks ship, and remat in the same bytes",
    "host": "what eager plans cost the host, beside the kernels",
    "laptop": "what a machine without a GPU says of steps on this one",
    "calibration": "the speed of this device, and the predicted time of plain steps",
}
MODELS: Final = ("resnet50", "gpt2", "llama")
DTYPES: Final = ("float32", "bfloat16")
SHARES: Final = {"budgets": (0.7, 0.5, 0.3), "exact": (0.6,), "room": (0.6,), "library": (0.6, 0.4)}
"""Of the plain step's measured peak; the smallest budget comes after them."""
UNTIMED: Final = frozenset({"exact", "library"})
"""Parts without times, so that several cases may run side by side."""


@dataclass(frozen=True)
class Case:
    """One process's work.

    Attributes:
        part: one of ``PARTS``.
        framework: "torch" or "jax".
        engine: how the step runs: "eager", "compiled", "graph"; "limit" is ``limit_memory``, graph mode where a model
            can be captured; "jit" in JAX; "expandable" is "graph" with segments of the allocator that can grow.
        model: one of ``MODELS``, in "library" one of PyTorch's zoo; "" for a part without one.
        dtype: of weights and activations, or of autocast in training; "" for a part without one.
    """

    part: str
    framework: str
    engine: str
    model: str = ""
    dtype: str = ""

    @property
    def key(self) -> str:
        """What the results know it by."""
        return "/".join(name for name in (self.part, self.framework, self.engine, self.model, self.dtype) if name)


def cases_of(part: str, frameworks: Sequence[str]) -> Iterator[Case]:
    """The cases of a part, the cheap ones first, so that a part that is cut off has seen something of each kind."""
    engines = {"torch": ("eager", "graph", "compiled"), "jax": ("jit",)}
    if part == "exact":  # Inductor's kernels round in another way with every plan.
        engines["torch"] = ("eager", "graph")
    if part in ("training", "room"):
        if "torch" in frameworks:
            yield from (
                Case(part, "torch", engine, model, dtype)
                for model in MODELS
                for engine in (("graph", "expandable") if part == "room" else ("graph",))
                for dtype in (("bfloat16", "float16") if (part, model) == ("training", "gpt2") else ("bfloat16",))
            )
        return
    if part == "library":
        if "torch" in frameworks:
            yield from (Case(part, "torch", engine, model) for engine in ("limit", "eager") for model in _library())
        return
    if part in ("host", "calibration", "laptop"):
        if part == "calibration":
            yield from (Case(part, framework, "") for framework in frameworks)
        elif "torch" in frameworks:
            yield Case(part, "torch", "eager")
        return
    for dtype in reversed(DTYPES):
        for model in MODELS:
            for framework in frameworks:
                for engine in engines[framework]:
                    yield Case(part, framework, engine, model, dtype)


def _library() -> Sequence[str]:
    """Models of PyTorch's zoo."""
    from benchmarks.zoo.torch import MODELS as ZOO  # It imports PyTorch and the libraries.

    return list(ZOO)


def speed_of(profile: DeviceProfile) -> dict[str, Any]:
    """The line of the results that says how fast a device was timed to be."""
    return {
        "name": "speed",
        "flops_per_s": dict(profile.flops_per_s),
        "bytes_per_s": profile.bytes_per_s,
        "overhead_s": profile.overhead_s,
    }
