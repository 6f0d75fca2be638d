"""AOTAutograd's notes on a joint graph: incoming gradients, inputs written to, roles, names, layers, lines of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, TypeVar

import torch
from torch import fx

from remat.core.labels import shown_path
from remat.torch._private import tree_leaves

_NAME: Final = "remat_name"  # Where a placeholder carries its name.
_TAKER: Final = "remat_taker"  # Where a placeholder carries what takes its gradient.
_PARTS: Final = "remat_parts"  # Where a placeholder carries of how many parts its gradient is.
STAND_INS: Final = "remat_stand_ins"
"""Where a backward pass carries what makes stand-ins for inputs of its step, by their places."""
_OF_A_SUM: Final = "Gradient addition node due to multiple use of tensor"
"""In the trace of a node where autograd adds gradients up; PyTorch 2.13 has a name for the words, 2.9 has none."""

_Taker = TypeVar("_Taker")
_LINE_OF_CODE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def is_tangent(node: fx.Node) -> bool:
    """Is the node an incoming gradient of the backward pass?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def overwritten_inputs(joint: fx.GraphModule) -> set[fx.Node]:
    """The inputs of a joint graph that AOTAutograd writes to, in the graph or after it."""
    (output,) = joint.graph.find_nodes(op="output")
    descriptions = output.meta.get("desc", ())
    written = {id(d.mutated_input) for d in tree_leaves(descriptions) if hasattr(d, "mutated_input")}
    found = set()
    for node in joint.graph.find_nodes(op="placeholder"):
        is_target = any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        if is_target or id(node.meta.get("desc")) in written:
            found.add(node)
    return found


def roles_of(joint: fx.GraphModule, static: Sequence[int]) -> dict[fx.Node, str]:
    """Roles of the inputs of a joint graph.

    Args:
        joint: the graph.
        static: places of the inputs that are the same in every step, parameters and buffers.
    """
    (output,) = joint.graph.find_nodes(op="output")
    differentiated = {d.grad_of for d in tree_leaves(output.meta.get("desc", ())) if hasattr(d, "grad_of")}
    found = {}
    for place, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        is_parameter = node.meta.get("desc") in differentiated
        found[node] = "batch" if place not in static else "parameter" if is_parameter else "state"
    return found


def layer_of(node: fx.Node) -> str:
    """The path of the module that a node belongs to, as Dynamo writes it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def is_in_forward(node: fx.Node) -> bool:
    """Was the node traced in the forward pass?"""
    return "nn_module_stack" in node.meta or "fwd_nn_module_stack" not in node.meta


def classes_around(node: fx.Node) -> set[str]:
    """Names of the classes of the modules that a node of the forward pass belongs to."""
    found = (one for _, one in (node.meta.get("nn_module_stack") or {}).values())
    return {getattr(one, "__name__", str(one).rpartition(".")[2]) for one in found}


def source_of(node: fx.Node) -> str:
    """The line of code that a node belongs to, a node of the backward pass that of its forward operator."""
    return _line_in(node.meta.get("stack_trace") or "")


@cache
def _line_in(stack_trace: str) -> str:
    lines = _LINE_OF_CODE.findall(stack_trace)
    return "{}:{} in {}".format(shown_path(lines[-1][0]), *lines[-1][1:]) if lines else ""


def is_sum_of_gradients(node: fx.Node) -> bool:
    """Did autograd itself add the node, between two of its own operators?"""
    return _OF_A_SUM in (node.meta.get("stack_trace") or "")


def note_inputs(joint: fx.GraphModule, names: Sequence[str], takers: Mapping[int, Callable[..., None]]) -> None:
    """Note what is known of the inputs of a joint graph.

    Args:
        joint: the graph.
        names: of the inputs of the graph that was differentiated.
        takers: what takes the gradient of an input as soon as it is final, by the place of the input.
    """
    for node in joint.graph.find_nodes(op="placeholder"):
        place = getattr(node.meta.get("desc"), "idx", None)
        if not is_tangent(node) and place is not None and place < len(names):
            node.meta[_NAME] = names[place]
            if place in takers:
                node.meta[_TAKER] = takers[place]


def note_parts(joint: fx.GraphModule, num_fwd_outputs: int, counts: Sequence[int]) -> None:
    """Note of how many parts, which the joint graph adds up, the gradient of each input is.

    Args:
        joint: the graph, as it was traced.
        num_fwd_outputs: how many of its outputs are the forward pass'.
        counts: the parts of each gradient, 0 where there is none.
    """
    (output,) = joint.graph.find_nodes(op="output")
    (results,) = output.args
    assert isinstance(results, list | tuple)
    made = [place for place in range(num_fwd_outputs, len(results)) if isinstance(results[place], fx.Node)]
    found = [count for count in counts if count]
    inputs = gradients_of(joint, num_fwd_outputs)
    # Where a gradient is missing that autograd had a way for, nobody knows which: all sums in front count then.
    known = found if len(found) == len(made) else [len(joint.graph.nodes)] * len(made)
    for place, count in zip(made, known, strict=True):
        if place in inputs:
            inputs[place].meta[_PARTS] = count


def parts_of(node: fx.Node) -> int:
    """Of how many parts the gradient of an input is."""
    return int(node.meta.get(_PARTS, 1))


def place_of(node: fx.Node) -> int | None:
    """The place of an input among those of the graph that was differentiated."""
    place: int | None = getattr(node.meta.get("desc"), "idx", None)
    return place


def gradients_of(joint: fx.GraphModule, num_fwd_outputs: int) -> dict[int, fx.Node]:
    """The inputs that the gradients belong to, by their places among the outputs of a joint graph."""
    inputs = {node.meta.get("desc"): node for node in joint.graph.find_nodes(op="placeholder")}
    (output,) = joint.graph.find_nodes(op="output")
    found = {}
    for place, description in enumerate(output.meta.get("desc", ())):
        node = inputs.get(getattr(description, "grad_of", None))
        if place >= num_fwd_outputs and node is not None:
            found[place] = node
    return found


def takers_of(joint: fx.GraphModule, num_fwd_outputs: int) -> dict[int, tuple[fx.Node, Callable[..., None]]]:
    """What takes gradients before the end of the backward pass, by their places among the outputs of a joint graph.

    Beside each stands the input that the gradient belongs to.
    """
    found = gradients_of(joint, num_fwd_outputs).items()
    return {place: (node, node.meta[_TAKER]) for place, node in found if _TAKER in node.meta}


def taken_out(node: fx.Node, kind: type[_Taker]) -> _Taker | None:
    """What takes the gradient of an input, if it is of some kind; the input is one like any other from here on."""
    found = node.meta.get(_TAKER)
    if not isinstance(found, kind):
        return None
    del node.meta[_TAKER]
    return found


def leave_out(node: fx.Node) -> None:
    """The gradient of an input arrives at the end of the backward pass after all."""
    node.meta.pop(_TAKER).is_left_out = True


def name_of(node: fx.Node) -> str:
    """The name of an input, that of its parameter in a module say; of any other node, the node's own."""
    return str(node.meta.get(_NAME, node.name))
