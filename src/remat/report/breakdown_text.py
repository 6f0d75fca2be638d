"""Tables of what the bytes of a step are, and of which batch fits."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from remat.core.breakdown import CATEGORIES, Breakdown
from remat.core.budget import format_bytes
from remat.core.graph import Graph
from remat.core.labels import layer_of
from remat.planning.batch_size import LargestBatches


def breakdown_table(plain: Breakdown, planned: Breakdown | None = None) -> Table:
    """Bytes by category at the peak of the plain step and, where one is given, of the planned one."""
    table = Table(title="At the peak", title_justify="left", title_style="bold")
    table.add_column("Bytes of")
    columns = [("plain", plain)] + ([("planned", planned)] if planned is not None else [])
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for category in CATEGORIES:
        sizes = [found.size_bytes[category] for _, found in columns]
        if any(sizes):
            table.add_row(category.replace("_", " "), *map(format_bytes, sizes))
    table.add_section()
    table.add_row("all", *(format_bytes(found.total_bytes) for _, found in columns))
    return table


def largest_tensors_table(graph: Graph, found: Breakdown, *, title: str) -> Table:
    """The largest tensors alive at a peak, with the layer and the line that made them."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for heading in ("Size", "Shape", "What", "Op", "Layer", "Source"):
        table.add_column(heading, justify="right" if heading == "Size" else "left", overflow="fold")
    for live in found.largest:
        tensor = graph.tensors[live.tensor]
        op = None if live.op is None else graph.ops[live.op]
        shape = "" if tensor.shape is None else str(list(tensor.shape))
        table.add_row(
            format_bytes(live.size_bytes),
            Text(f"{shape} {tensor.dtype or ''}".strip()),
            live.category.replace("_", " "),
            Text(tensor.name if op is None else op.kind),
            Text("" if live.op is None else layer_of(graph, live.op)),
            Text("" if op is None else _short(op.source)),
        )
    return table


def largest_batches_table(found: LargestBatches) -> Table:
    """The largest batch within a budget, plain and planned."""
    table = Table(
        title=f"Largest batch for {format_bytes(found.budget_bytes)}", title_justify="left", title_style="bold"
    )
    for heading in ("", "Batch", "Predicted peak", "Overhead"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, one in (("plain", found.plain), ("with recomputation", found.planned)):
        batch = f"{one.batch_size:,}" if one.batch_size else "none; one sample needs"
        table.add_row(name, batch, format_bytes(one.peak_bytes), f"{one.overhead:.1%}")
    return table


def _short(source: str) -> str:
    """The file and the line without folders and function, which a terminal has no room for."""
    return source.partition(" in ")[0].rpartition("/")[2]
