"""Training steps of a regular form: a chain, a fan, equal residual blocks."""

from __future__ import annotations

from remat.core.graph import Graph, Op, Tensor


def chain(n: int, *, size_bytes: int = 1, time_s: float = 1.0, free_order: bool = True) -> Graph:
    """A training step over a chain of ``n`` layers: ``n`` forward ops, then ``n`` backward ops.

    Forward op i reads activation i - 1 and makes activation i; activation 0 is the pinned batch. The backward op of
    layer i reads the gradient of activation i (for the last layer the activation itself, as a loss would) and
    activation i - 1, and makes the gradient of activation i - 1, of which the last is the graph's output.

    Args:
        n: number of layers, 0 or more.
        size_bytes: of each activation and each gradient.
        time_s: of each op.
        free_order: whether a plan may move first computations.
    """
    batch = 0
    tensors = [Tensor(size_bytes, "batch")]
    ops: list[Op] = []
    for layer in range(1, n + 1):
        tensors.append(Tensor(size_bytes, f"activation{layer}"))
        ops.append(Op(f"forward{layer}", "Forward", (layer - 1,), (layer,), time_s))
    gradient = n
    for layer in range(n, 0, -1):
        tensors.append(Tensor(size_bytes, f"gradient{layer - 1}"))
        ops.append(Op(f"backward{layer}", "Backward", (gradient, layer - 1), (len(tensors) - 1,), time_s))
        gradient = len(tensors) - 1
    outputs = (gradient,) if n else ()
    return Graph(tuple(ops), tuple(tensors), (batch,), outputs, free_order)


def fan(branches: int, depth: int, *, free_order: bool = True) -> Graph:
    """Chains from one source, one step of each in turn: what evicts by recency recomputes whole chains.

    After the adversary of Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616). In program order
    every chain's end is alive all the time; one chain after another needs three tensors.

    Args:
        branches: number of chains.
        depth: ops of each chain.
        free_order: as in ``Graph``.
    """
    ops = [Op("source", "Fan", (), (0,), 1.0)]
    ends = [0] * branches
    for level in range(depth):
        for branch in range(branches):
            made = len(ops)
            ops.append(Op(f"branch{branch}.{level}", "Fan", (ends[branch],), (made,), 1.0))
            ends[branch] = made
    return Graph(tuple(ops), tuple(Tensor(1, f"t{i}") for i in range(len(ops))), (), (), free_order)


def residual_blocks(blocks: int, width: int = 3, *, draws: bool = False) -> Graph:
    """A training step of equal blocks with a sum around each, in a fixed order: a graph that repeats itself.

    Args:
        blocks: number of blocks.
        width: ops of each, beside the sum.
        draws: whether every second block draws a mask, which may run once only.
    """
    tensors, ops = [Tensor(0, "batch"), Tensor(10, "stem")], [Op("stem", "Conv", (0,), (1,), 1.0)]
    tape: list[list[int]] = []

    def add(kind: str, inputs: tuple[int, ...], *, size: int = 10, recomputable: bool = True) -> int:
        tensors.append(Tensor(size))
        ops.append(Op(f"{kind}{len(ops)}", kind, inputs, (len(tensors) - 1,), 1.0, recomputable))
        return len(tensors) - 1

    x = 1
    for block in range(blocks):
        inner = [x]
        for _ in range(width):
            inner.append(add("Conv", (inner[-1],), size=20))
        if draws and block % 2:
            mask = add("Draw", (inner[-1],), recomputable=False)
            inner.append(add("Mul", (inner[-1], mask), size=20))
        tape.append(inner)
        x = add("Add", (x, inner[-1]))
    gradient = add("Loss", (x,))
    for inner in reversed(tape):
        inside = gradient
        for value in reversed(inner[:-1]):
            inside = add("ConvGrad", (inside, value), size=20)
        gradient = add("Sum", (gradient, inside))
    return Graph(tuple(ops), tuple(tensors), (0,), (gradient,), free_order=False)
