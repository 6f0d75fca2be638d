"""A graph of operators -> a Python function that calls them in order, and drops each tensor at its last read.

The function is written as source, so that a call of an operator is a few bytecodes: no interpreter, no dictionary of
values. It takes its arguments in a list, which it empties, so that it holds none of them longer than it must.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import linecache
import math
from collections.abc import Callable
from typing import Any, Final

from torch import fx

from remat.torch.graph_mode import _aot, nodes
from remat.torch.graph_mode.calls import Calls

_numbers: Final = itertools.count(1)
_WRITTEN_OUT: Final = (int, bool, str, type(None))


def function_of(module: fx.GraphModule, calls: Calls, name: str) -> Callable[[list[Any]], Any]:
    """The function of a graph.

    Args:
        module: with the graph; its nodes call functions only.
        calls: how operators are called.
        name: of the pass, for tracebacks.

    Returns:
        It takes a list of arguments, and empties the list. It returns a list. ``source`` is its code.
    """
    writer = _Writer(module, calls)
    source = writer.source(name)
    file = f"<remat {name} {next(_numbers)}>"
    scope: dict[str, Any] = dict(writer.scope)
    exec(builtins.compile(source, file, "exec"), scope)
    # Tracebacks and debuggers show the line.
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    body: Callable[[list[Any]], Any] = scope[name]
    below_autograd = _aot.below_autograd

    def run(args: list[Any]) -> Any:
        with below_autograd():
            return body(args)

    run.source = source  # type: ignore[attr-defined]
    return run


class _Writer:
    def __init__(self, module: fx.GraphModule, calls: Calls) -> None:
        self._module = module
        self._calls = calls
        self.scope: dict[str, Any] = {}
        self._known: dict[Any, str] = {}
        self._names: dict[fx.Node, str] = {}
        self._taken: set[str] = set()

    def source(self, name: str) -> str:
        """The function as text; ``scope`` holds what it refers to."""
        graph = self._module.graph
        lines = [f"def {name}(args):"]
        given = [self._name(node) for node in graph.find_nodes(op="placeholder")]
        if given:
            lines.append(f"    {', '.join(given)}, = args")
        lines.append("    args.clear()")
        last = _last_users(graph)
        unused = [self._names[node] for node in graph.find_nodes(op="placeholder") if not node.users]
        if unused:
            lines.append(f"    del {', '.join(unused)}")
        for node in graph.nodes:
            gone: list[str] = []
            if node.op == "output":
                (results,) = node.args
                lines.append(f"    return [{', '.join(map(self._written, results))}]")
                break
            if node.op != "call_function" or self._is_unpacked(node):
                continue
            parts = self._parts(node)
            call = self._call(node)
            if parts is not None:
                targets = [self._name(part) if part is not None else "_" for part in parts]
                lines.append(f"    {', '.join(targets)}, = {call}")
                gone += ["_"] if None in parts else []
                gone += [self._names[part] for part in parts if part is not None and not part.users]
            elif node.users:
                lines.append(f"    {self._name(node)} = {call}")
            else:
                lines.append(f"    {call}")
            gone += [self._names[read] for read in last.get(node, ()) if read in self._names]
            if gone:
                lines.append(f"    del {', '.join(gone)}")
        return "\n".join(lines) + "\n"

    def _is_unpacked(self, node: fx.Node) -> bool:
        """Is the node a part of a call whose parts get their names where the call is?"""
        return nodes.is_part(node) and self._parts(node.args[0]) is not None  # type: ignore[arg-type]

    def _parts(self, node: fx.Node) -> list[fx.Node | None] | None:
        """The parts of a call that returns several tensors, None for those that nobody reads; else None."""
        value = node.meta.get("val")
        if not isinstance(value, list | tuple) or not all(nodes.is_part(user) for user in node.users):
            return None
        found: list[fx.Node | None] = [None] * len(value)
        for user in node.users:
            place = int(user.args[1])  # type: ignore[arg-type]
            if found[place] is not None:
                return None  # Two names for one part.
            found[place] = user
        return found

    def _call(self, node: fx.Node) -> str:
        function = self._constant(self._calls.function_of(node), "f")
        args = [self._written(one) for one in node.args]
        args += [f"{name}={self._written(value)}" for name, value in node.kwargs.items()]
        return f"{function}({', '.join(args)})"

    def _written(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return (
                self._constant(nodes.attribute_of(self._module, value), "c")
                if value.op == "get_attr"
                else self._name(value)
            )
        if type(value) in _WRITTEN_OUT or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list | tuple):
            parts = ", ".join(map(self._written, value))
            return f"({parts},)" if isinstance(value, tuple) and value else f"[{parts}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name!r}: {self._written(one)}" for name, one in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._written(value.start)}, {self._written(value.stop)}, {self._written(value.step)})"
        return self._constant(value, "c")

    def _constant(self, value: Any, kind: str) -> str:
        """A name in the function's scope."""
        key = id(value)
        if key not in self._known:
            self._known[key] = f"{kind}{len(self.scope)}_"
            self.scope[self._known[key]] = value
        return self._known[key]

    def _name(self, node: fx.Node) -> str:
        if node not in self._names:
            name = node.name if not keyword.iskeyword(node.name) else f"{node.name}_"
            while name in self._taken or name in ("args", "_", "slice"):
                name += "_"
            self._taken.add(name)
            self._names[node] = name
        return self._names[node]


def _last_users(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the nodes that nobody reads after it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        # The parts of a call are made where the call is.
        for read in node.all_input_nodes:
            if read not in seen and read.op != "get_attr":
                seen.add(read)
                found.setdefault(node, []).append(read)
    return found
