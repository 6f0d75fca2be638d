"""``Report``: a plan for people, as an interactive page, as a picture, and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.files import write_atomically
from remat.core.graph import Graph
from remat.core.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE_ENDINGS = (".html", ".htm")


@dataclass(frozen=True)
class Report:
    """A plan with its graph and, where it was computed, the frontier that the plan lies on.

    In a notebook it shows itself as the interactive page.

    Attributes:
        graph: the training step.
        plan: for that graph.
        frontier: what other budgets cost, from ``remat.frontier``; may be empty.
        title: of the page and the picture.

    Raises:
        PlanMismatch: if the plan is for another graph.
    """

    graph: Graph
    plan: Plan
    frontier: Sequence[Plan] = ()
    title: str = "Training step"

    def __post_init__(self) -> None:
        self.plan.check_graph(self.graph)

    def html(self) -> str:
        """One self-contained page: no request leaves it, so it works offline and from a file."""
        from remat.report.page import render

        return render(self.graph, self.plan, self.frontier, title=self.title)

    def figure(self) -> Figure:
        """Memory over the step, what fills its peak and, with a frontier, what each budget costs, as one picture."""
        from remat.report.plots import report_figure

        return report_figure(self.graph, self.plan, self.frontier, title=self.title)

    def save(self, path: str | Path) -> None:
        """Write the page (``.html``) or the picture (``.png``, ``.svg``, ``.pdf``); the ending chooses.

        A file of that name is replaced only by a whole one.

        Raises:
            ValueError: if the ending is no known format.
            OSError: if the file cannot be written.
        """
        if Path(path).suffix.lower() in _PAGE_ENDINGS:
            write_atomically(path, self.html().encode())
            return
        from remat.report.plots import save_figure

        save_figure(self.figure(), path)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame of its own, so that neither's styles reach the other."""
        page, title = html.escape(self.html()), html.escape(self.title)
        return f'<iframe srcdoc="{page}" title="{title}" style="width:100%;height:46rem;border:0"></iframe>'


def check_report_path(path: str | Path) -> None:
    """Make sure that a report can be written under this name, before work is spent on it.

    Raises:
        ValueError: if the ending is no known format; the message lists the formats.
    """
    if Path(path).suffix.lower() in _PAGE_ENDINGS:
        return
    from remat.report.plots import check_picture_path

    try:
        check_picture_path(path)
    except ValueError as error:
        raise ValueError(f"{error}; or in html for the interactive page") from None
