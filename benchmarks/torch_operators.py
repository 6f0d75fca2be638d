"""What PyTorch's operators take on a CPU, beside what plans count: ``python -m benchmarks.torch_operators``.

Each operator of ``remat/torch/trace/cpu_times.py`` that is common is run alone on one thread. Prints, and keeps in
``benchmarks/results``, its least processor time as operations of a product of two matrices that was timed in the same
run, what plans count for it, and the ratio: those figures are shares of a product, so that they hold on other cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.where import here
from remat.torch.trace import cpu_times, op_facts

RESULT: Final = Path(__file__).parent / "results" / "torch-operators.md"
_EDGE: Final = 512
_LEAST_S: Final = 0.02
_ROUNDS: Final = 7

_ATEN: Final = torch.ops.aten
_Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def seconds(function: Callable[[], Any]) -> float:
    """The least processor seconds of one call in some rounds of many."""
    function()
    repeats = 1
    while (spent := _spent(function, repeats)) < _LEAST_S:
        repeats *= 2
    return min([spent, *(_spent(function, repeats) for _ in range(_ROUNDS - 1))]) / repeats


def _spent(function: Callable[[], Any], repeats: int) -> float:
    started = time.process_time()
    for _ in range(repeats):
        function()
    return time.process_time() - started


def calls() -> Iterator[_Call]:
    """A name, an operator, and what it is called with."""
    x, y = torch.randn(_EDGE, _EDGE), torch.rand(_EDGE, _EDGE) + 0.1
    for name in ("exp", "erf", "sin", "tanh", "softplus", "mish", "sort", "cumsum"):
        func = getattr(_ATEN, name).default
        yield name, func, (x, -1) if name in ("sort", "cumsum") else (x,), {}
    yield "log", _ATEN.log.default, (y,), {}
    yield "pow 1.7", _ATEN.pow.Tensor_Scalar, (y, 1.7), {}
    yield "gelu, by tanh", _ATEN.gelu.default, (x,), {"approximate": "tanh"}
    yield "where, a mask of attention", _ATEN.where.self, (torch.ones(_EDGE, _EDGE).tril().bool(), x, y), {}
    yield "native_dropout", _ATEN.native_dropout.default, (x, 0.1, True), {}
    yield "bernoulli_", _ATEN.bernoulli_.float, (x.clone(), 0.9), {}
    yield "var_mean", _ATEN.var_mean.correction, (x, [1]), {}
    for order, layout in (("first", torch.contiguous_format), ("last", torch.channels_last)):
        picture = torch.randn(8, 64, 56, 56).to(memory_format=layout)
        weights = torch.ones(64)
        window = ([3, 3], [2, 2], [1, 1])
        yield f"maximum over 3 x 3, channels {order}", _ATEN.max_pool2d_with_indices.default, (picture, *window), {}
        yield f"average over 3 x 3, channels {order}", _ATEN.avg_pool2d.default, (picture, *window), {}
        normalised = (picture, weights, weights, None, None, True, 0.1, 1e-5)
        yield f"BatchNorm, channels {order}", _ATEN.native_batch_norm.default, normalised, {}
        for edge in (3, 7):
            small = picture[:, :, :28, :28].contiguous(memory_format=layout)
            weight = torch.randn(64, 1, edge, edge)
            how = ([1, 1], [edge // 2, edge // 2], [1, 1], False, [0, 0], 64)
            name = f"{edge} x {edge} for each channel, channels {order}"
            yield name, _ATEN.convolution.default, (small, weight, None, *how), {}
            mask = [True, True, False]
            backward = _ATEN.convolution_backward.default
            yield f"gradients of {name}", backward, (small, small, weight, None, *how, mask), {}


def rows() -> Iterator[str]:
    """A line for each call."""
    square = torch.randn(_EDGE, _EDGE)
    product_s = seconds(lambda: square @ square) / (2 * _EDGE**3)
    for name, func, args, kwargs in calls():
        out = func(*args, **kwargs)
        counted = cpu_times.flops(func, args, kwargs, out, op_facts.flops(func, args, kwargs, out))
        taken = seconds(lambda func=func, args=args, kwargs=kwargs: func(*args, **kwargs)) / product_s
        yield f"| {name} | {taken / 1e6:.1f} | {counted / 1e6:.1f} | {counted / taken:.2f} |"


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = [
        "# PyTorch's operators on one thread of a CPU, in operations of a product",
        "",
        here(),
        "",
        "| operator | took, million operations | counted | counted / took |",
        "|---|---|---|---|",
    ]
    for row in rows():
        text.append(row)
        print(row, flush=True)
    RESULT.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
