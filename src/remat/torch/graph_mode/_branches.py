"""Branches on tensors that hardly anything was computed for, decided while Dynamo captures a step.

Dynamo ends a capture where a branch depends on a tensor. Some such tensors are made of shapes alone: transformers asks
whether positions that it has counted itself follow one another, and makes a mask for attention unless they do. Others
are made of one tensor of the batch: is its attention mask full? What such a tensor holds is computed at once, and
Dynamo goes on with the branch that eager PyTorch takes. Where the batch has a say, a guard asks again at each call, and
a batch that takes the other branch is captured for itself.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._guards import TracingContext

_MOST_NODES: Final = 64
_MOST_ELEMENTS: Final = 1 << 20
"""How much is computed for a branch. A judgement: positions and masks of one sequence. With more, a capture may take
seconds longer; with less, longer sequences are captured as for a compiler."""

# Functions and methods that draw nothing, write nothing and give the same for the same arguments.
_KNOWN: Final = frozenset((
    "arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "tensor", "getitem", "unsqueeze",
    "squeeze", "expand", "reshape", "view", "flatten", "to", "long", "int", "bool", "float", "diff", "cumsum",
    "sum", "amin", "amax", "min", "max", "all", "any", "ne", "eq", "lt", "le", "gt", "ge", "add", "sub", "mul",
    "neg", "abs", "logical_and", "logical_or", "logical_not", "and_", "or_", "invert", "tril", "triu",
))  # fmt: skip

_BRANCHES: Final = [
    code
    for code, name in enumerate(dis.opname)
    if name in ("UNARY_NOT", "TO_BOOL") or name.endswith(("_IF_TRUE", "_IF_FALSE", "_OR_POP"))
]


@contextmanager
def decided_branches() -> Iterator[None]:
    """Inside, Dynamo takes such branches as eager PyTorch takes them."""
    before = [(table, table[:]) for table, _ in _tables()]
    for table, ours in _tables():
        table[:] = ours
    try:
        yield
    finally:
        for table, own in before:
            table[:] = own


@cache
def _tables() -> list[tuple[list[Any], list[Any]]]:
    """Dynamo's tables of what it does at each instruction, which it fills once, and what stands in them inside."""
    found = []
    for translator in vars(symbolic_convert).values():
        table = vars(translator).get("dispatch_table") if isinstance(translator, type) else None
        if table is not None:
            ours = [_decides(act) if code in _BRANCHES and act is not None else act for code, act in enumerate(table)]
            found.append((table, ours))
    return found


def _decides(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def branch(translator: Any, instruction: Any) -> Any:
        top = translator.stack[-1] if translator.stack else None
        if isinstance(top, TensorVariable) and (condition := condition_of(top.as_proxy().node)) is not None:
            value = condition.now()
            if condition.asked is not None:
                _guard(condition, value)
            translator.stack[-1] = ConstantVariable.create(value)
        return own(translator, instruction)

    return branch


@dataclass(frozen=True)
class Condition:
    """A condition that can be computed beforehand.

    Attributes:
        steps: the calls that compute it, in order.
        asked: the input of the captured graph that it reads; None where it follows from shapes.
    """

    steps: tuple[fx.Node, ...]
    asked: fx.Node | None

    def now(self) -> bool:
        """What it is for the batch that is captured."""
        return self.of(None if self.asked is None else self.asked.meta["grapharg"].example)

    def of(self, tensor: torch.Tensor | None) -> bool:
        """What it is where the input is this tensor."""
        values: dict[fx.Node, Any] = {} if self.asked is None else {self.asked: tensor}
        with torch.no_grad():
            for step in self.steps:
                args, kwargs = fx.map_arg((step.args, step.kwargs), values.__getitem__)
                function = step.target if callable(step.target) else getattr(type(args[0]), str(step.target))
                values[step] = function(*args, **kwargs)
        return bool(values[self.steps[-1]])


def condition_of(node: fx.Node) -> Condition | None:
    """A captured tensor as a condition; None where it can't be computed beforehand."""
    steps: dict[fx.Node, None] = {}  # In an order in which they can be computed.
    asked: dict[fx.Node, None] = {}

    def is_known(one: fx.Node) -> bool:
        if one in steps or one in asked:
            return True
        if len(steps) >= _MOST_NODES or not _is_unwritten_and_small(one):
            return False
        if one.op == "placeholder":
            asked[one] = None
            return isinstance(getattr(one.meta.get("grapharg"), "example", None), torch.Tensor)
        if one.op not in ("call_function", "call_method") or _name(one) not in _KNOWN:
            return False
        if not all(is_known(source) for source in one.all_input_nodes):
            return False
        steps[one] = None
        return True

    if not is_known(node) or not steps or len(asked) > 1 or node.meta["example_value"].numel() != 1:
        return None
    return Condition(tuple(steps), next(iter(asked), None))


def _is_unwritten_and_small(node: fx.Node) -> bool:
    """Does a tensor hold what it held at first? Nobody trains it, either: training changes it at every step."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    return value.numel() <= _MOST_ELEMENTS and value._version == 0


def _guard(condition: Condition, value: bool) -> None:
    """Have Dynamo ask at each call whether the batch still takes this branch."""
    assert condition.asked is not None
    said = [f"a branch on {condition.asked.name} is {value}"]

    def takes_this_branch(builder: Any, guard: Any) -> None:
        add = builder.get_guard_manager(guard).add_lambda_guard
        test = lambda tensor: condition.of(tensor) is value  # noqa: E731
        try:
            add(test, said, None)
        except TypeError:  # PyTorch 2.9 is told no stack.
            add(test, said)

    source = condition.asked.meta["grapharg"].source
    TracingContext.get().guards_context.dynamo_guards.add(source.make_guard(takes_this_branch))


def _name(node: fx.Node) -> str:
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    # PyTorch 2.9 has methods where later versions have functions.
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name
