"""Random graphs with every feature of the memory model, and random legal schedules of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from remat.core.graph import Graph, Op, Tensor
from remat.core.schedule import Schedule


def random_graph(
    rng: random.Random | int,
    n_ops: int = 8,
    *,
    max_size_bytes: int = 64,
    free_order: bool | None = None,
) -> Graph:
    """A random valid graph with every feature of the memory model in it now and then.

    Args:
        rng: a source of randomness, or a seed; equal seeds give equal graphs.
        n_ops: number of ops, 0 or more.
        max_size_bytes: of a tensor; some have 0.
        free_order: as in ``Graph``; None draws it.
    """
    source = random.Random(rng) if isinstance(rng, int) else rng
    draft = _Draft(source, max_size_bytes)
    inputs = tuple(draft.add_tensor() for _ in range(source.randint(0, 2)))
    draft.ops.extend(draft.next_op(index) for index in range(n_ops))
    outputs = tuple(tensor for tensor in range(len(draft.tensors)) if draft.chance(0.15))
    order = draft.chance(0.5) if free_order is None else free_order
    return Graph(tuple(draft.ops), tuple(draft.tensors), inputs, outputs, order)


@dataclass
class _Draft:
    rng: random.Random
    max_size_bytes: int
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def add_tensor(self, alias_of: int | None = None) -> int:
        size_bytes = 0 if self.chance(0.1) else self.rng.randint(1, self.max_size_bytes)
        self.tensors.append(Tensor(size_bytes, f"t{len(self.tensors)}", alias_of=alias_of))
        return len(self.tensors) - 1

    def next_op(self, index: int) -> Op:
        reads = tuple(self._pick_read() for _ in range(self.rng.randint(0, 3))) if self.tensors else ()
        outputs: list[int] = []
        for _ in range(self.rng.randint(0, 2)):
            # A view of what the op reads, of one of its bases, or of what the same op makes.
            bases = [*(base for tensor in reads for base in self._bases(tensor)), *outputs]
            view = self.rng.choice(bases) if bases and self.chance(0.3) else None
            outputs.append(self.add_tensor(view))
        return Op(
            name=f"op{index}",
            kind="Random",
            inputs=reads,
            outputs=tuple(outputs),
            time_s=float(self.rng.randint(0, 9)),
            recomputable=self.chance(0.8),
            workspace_bytes=self.rng.randint(1, self.max_size_bytes) if self.chance(0.2) else 0,
            after=(self.rng.randrange(index),) if index and self.chance(0.15) else (),
            in_place=tuple((read, made) for read in dict.fromkeys(reads) for made in outputs if self.chance(0.4)),
        )

    def _pick_read(self) -> int:
        # Mostly recent tensors, as in real steps, and now and then one from far back.
        if self.chance(0.3):
            return self.rng.randrange(len(self.tensors))
        return self.rng.randint(max(0, len(self.tensors) - 4), len(self.tensors) - 1)

    def _bases(self, tensor: int) -> list[int]:
        found = [tensor]
        while (base := self.tensors[found[-1]].alias_of) is not None:
            found.append(base)
        return found


def random_schedule(graph: Graph, rng: random.Random | int, *, recompute: float = 0.3) -> Schedule:
    """A random legal schedule, with recomputation wherever it is legal, useful or not.

    Args:
        graph: the training step.
        rng: a source of randomness, or a seed.
        recompute: the chance that an op which ran before runs again at a step, below 1.
    """
    source = random.Random(rng) if isinstance(rng, int) else rng
    schedule: list[int] = []
    done: set[int] = set()
    while len(done) < len(graph.ops):
        repeatable = sorted(op for op in done if graph.ops[op].recomputable)
        if repeatable and source.random() < recompute:
            schedule.append(source.choice(repeatable))
            continue
        op = source.choice(_ready(graph, done)) if graph.free_order else len(done)
        schedule.append(op)
        done.add(op)
    return tuple(schedule)


def _ready(graph: Graph, done: set[int]) -> list[int]:
    return [
        index
        for index, op in enumerate(graph.ops)
        if index not in done
        and done.issuperset(op.after)
        and all(graph.producer[tensor] is None or graph.producer[tensor] in done for tensor in op.inputs)
    ]
