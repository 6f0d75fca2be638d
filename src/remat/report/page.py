"""The interactive page of a report: one HTML file with its styles, scripts and data in it.

The charts are a few hundred lines of our own (``page/*.js``) and not a chart library. Plotly, the one with a Python
package that can be inlined, ships its full bundle only, which is larger than the 3 MB that the whole page may take; its
curves cannot be walked through with the keyboard; and it thins a staircase of 10,000 steps out where this one draws the
highest step in each column of pixels, so that no peak is lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from remat.core.breakdown import CATEGORIES, Breakdown, breakdown, bytes_by_category
from remat.core.budget import format_bytes
from remat.core.graph import Graph
from remat.core.labels import layer_of
from remat.core.plan import ONE_BY_ONE, Plan
from remat.core.schedule import recomputed_ops
from remat.core.simulator import simulate
from remat.report.recomputed import recomputed_layers
from remat.report.sliced import sliced_layers
from remat.report.text import format_time, shape_and_dtype

_ROWS_SHOWN: Final = 20  # Layers that the table shows before it is opened.
_LONGEST_NAME: Final = 96  # Letters of a name: those of one line of the page. Only its end is kept of a longer one.
_SCRIPTS: Final = ("memory_chart.js", "frontier_chart.js", "page.js")


def render(graph: Graph, plan: Plan, frontier: Sequence[Plan], *, title: str) -> str:
    """The page as text; a graph of 10,000 ops gives 1 to 2 MB.

    Args:
        graph: the training step.
        plan: for that graph.
        frontier: what other budgets cost; may be empty.
        title: of the page.
    """
    planned = plan.recomputed > 0
    breakdowns = [("plain", breakdown(graph))]
    if planned:
        breakdowns.append(("planned", breakdown(graph, plan.schedule)))
    # autoescape covers names of ops and layers, which come from the user's code.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    template = environment.from_string(_asset("page.html.jinja"))
    return template.render(
        title=title,
        version=_version(),
        fingerprint=plan.fingerprint,
        planner=plan.planner,
        css=Markup(_asset("page.css")),
        script=Markup("\n".join(map(_asset, _SCRIPTS))),
        data=_json_in_html(_chart_data(graph, plan, frontier)),
        summary=_summary(plan),
        cards=_cards(graph, plan),
        budget=format_bytes(plan.budget_bytes),
        timed=graph.time_s > 0,
        curves=[label for label, _ in breakdowns],
        curve_legend=[
            {"colour": label, "text": f"{label}{_in_slices(plan)}: peak {format_bytes(found.total_bytes)}"}
            for label, found in breakdowns
        ],
        categories=_categories_in_use(breakdowns),
        has_frontier=bool(frontier),
        in_slices=_in_slices(plan),
        bound_meaning=plan.lower_bound_meaning,
        bars=[_bar(label, found) for label, found in breakdowns],
        breakdown_rows=_breakdown_rows(breakdowns),
        largest=[_largest(graph, label, found) for label, found in reversed(breakdowns)],
        layer_rows=_layer_rows(graph, plan),
        changes=_changes(plan),
        sliced_rows=_sliced_rows(graph, plan),
        rows_shown=_ROWS_SHOWN,
        exactness=_exactness(graph, plan),
    )


def _asset(name: str) -> str:
    return (resources.files("remat.report") / "page" / name).read_text(encoding="utf-8")


def _version() -> str:
    import remat

    return remat.__version__


def _json_in_html(values: dict[str, Any]) -> Markup:
    # "</script>" in a name would end the element; inside JSON a "<" can be written another way.
    text = json.dumps(values, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _chart_data(graph: Graph, plan: Plan, frontier: Sequence[Plan]) -> dict[str, Any]:
    curves = [_curve(graph, "plain", graph.plain_schedule)]
    if plan.recomputed:
        curves.append(_curve(graph, "planned", plan.schedule))
    kinds, kind_of = _numbered([op.kind for op in graph.ops])
    layers, layer_number = _numbered([layer_of(graph, index) for index in range(len(graph.ops))])
    sources, source_number = _numbered([op.source for op in graph.ops])
    return {
        "timed": graph.time_s > 0,
        "budget": plan.budget_bytes,
        "kinds": kinds,
        "layers": layers,
        "sources": sources,
        "ops": {
            "name": [_shortened(op.name) for op in graph.ops],
            "kind": kind_of,
            "layer": layer_number,
            "source": source_number,
            "time": [float(f"{op.time_s:.4g}") for op in graph.ops],
        },
        "categories": [{"name": _shown(name), "colour": _colour(name)} for name in CATEGORIES],
        "curves": curves,
        "frontier": [_point(one) for one in frontier],
        "chosen": _point(_beside_its_graph(graph, plan)),
    }


def _beside_its_graph(graph: Graph, plan: Plan) -> Plan:
    """The plan with its extra time beside the plain schedule of its graph, which has the slices, as a frontier's is."""
    if plan.split is None or graph.time_s <= 0:
        return plan
    bound_s = (1 + plan.overhead_lower_bound) * plan.baseline_time_s
    overhead, bound = (max(0.0, seconds / graph.time_s - 1) for seconds in (plan.time_s, bound_s))
    return replace(plan, overhead=overhead, overhead_lower_bound=bound)


def _curve(graph: Graph, label: str, schedule: Sequence[int]) -> dict[str, Any]:
    by_category = bytes_by_category(graph, schedule)
    return {
        "label": label,
        "colour": label,
        # The plain step is every op once, in order.
        "ops": None if label == "plain" else list(schedule),
        "bytes": list(simulate(graph, schedule).bytes),
        "categories": [_once_if_constant(by_category[name]) for name in CATEGORIES],
    }


def _once_if_constant(values: list[int]) -> list[int] | int:
    return values[0] if values and len(set(values)) == 1 else values


def _numbered(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different texts, and for each its number among them."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(text, len(numbers)) for text in texts]
    return [_shortened(text) for text in numbers], found


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else f"...{text[3 - _LONGEST_NAME :]}"


def _point(plan: Plan) -> dict[str, Any]:
    return {
        "budget": plan.budget_bytes,
        "peak": plan.peak_bytes,
        "overhead": plan.overhead,
        "bound": plan.overhead_lower_bound,
    }


def _in_slices(plan: Plan) -> str:
    """Behind the name of a curve: a plan with slices has a graph that runs in them, whatever else is planned."""
    return "" if plan.split is None else f", in {plan.split.slices} slices"


def _summary(plan: Plan) -> str:
    plain, peak = format_bytes(plan.baseline_peak_bytes), format_bytes(plan.peak_bytes)
    need = f"A plain training step is predicted to need {plain}"
    again = f"{plan.recomputed:,} operations run a second time instead of being kept"
    if plan.split is None and not plan.recomputed:
        return f"{need}, which is within the budget: nothing is recomputed."
    saved = 1 - plan.peak_bytes / plan.baseline_peak_bytes
    if plan.split is None:
        how = again
    else:
        how = f"the widest part of the step runs in {plan.split.slices} slices"
        how += f", and {again}" if plan.recomputed else ", and nothing is recomputed"
    return f"{need}. Under this plan it needs {peak}, {saved:.0%} less, and takes {plan.overhead:.1%} longer: {how}."


def _cards(graph: Graph, plan: Plan) -> list[dict[str, str]]:
    notes = [f"{plan.peak_bytes / plan.baseline_peak_bytes:.1%} of plain"] if plan.baseline_peak_bytes else []
    if plan.measured_peak_bytes is not None:
        notes.append(f"the first step took {format_bytes(plan.measured_peak_bytes)}")
    mode = "" if plan.mode is None else f", mode {plan.mode}"
    return [
        {"name": "Budget", "value": format_bytes(plan.budget_bytes), "note": "everything on the device counted"},
        {"name": "Predicted peak", "value": format_bytes(plan.peak_bytes), "note": "; ".join(notes)},
        {
            "name": "Plain peak",
            "value": format_bytes(plan.baseline_peak_bytes),
            "note": f"{len(graph.ops):,} operations",
        },
        {
            "name": "Extra time",
            "value": f"{plan.overhead:.2%}",
            "note": f"{format_time(plan.time_s)} a step, plain {format_time(plan.baseline_time_s)}{_expected(plan)}",
        },
        _bound_card(plan),
        {
            "name": "Runs again",
            "value": f"{plan.recomputed:,}",
            "note": f"found by {plan.planner} in {plan.plan_seconds:.1f} s{mode}",
        },
    ]


def _expected(plan: Plan) -> str:
    """What runs are expected to take, where a front end knows what memory and calls add to them."""
    return "" if plan.expected_time_s is None else f"; {plan.expected_overhead:+.2%} expected, memory and calls counted"


def _bound_card(plan: Plan) -> dict[str, str]:
    if plan.overhead > 0 and plan.overhead_lower_bound == 0:
        return {"name": "Proven bound", "value": "none", "note": "nothing above 0 was proved"}
    value = f"{plan.overhead_lower_bound:.2%}"
    return {"name": "Proven bound", "value": value, "note": "no schedule takes less extra time"}


def _shown(category: str) -> str:
    return category.replace("_", " ")


def _colour(category: str) -> str:
    return f"c-{category.replace('_', '-')}"


def _categories_in_use(breakdowns: Sequence[tuple[str, Breakdown]]) -> list[dict[str, str]]:
    return [
        {"name": _shown(name), "meaning": meaning, "colour": _colour(name)}
        for name, meaning in CATEGORIES.items()
        if any(found.size_bytes[name] for _, found in breakdowns)
    ]


def _bar(label: str, found: Breakdown) -> dict[str, Any]:
    total = max(1, found.total_bytes)
    parts = [
        {
            "name": _shown(name),
            "size": format_bytes(size),
            "share": round(100 * size / total, 3),
            "colour": _colour(name),
        }
        for name, size in found.size_bytes.items()
        if size
    ]
    return {"label": label, "total": format_bytes(found.total_bytes), "parts": parts}


def _breakdown_rows(breakdowns: Sequence[tuple[str, Breakdown]]) -> list[dict[str, Any]]:
    return [
        {
            "name": _shown(name),
            "colour": _colour(name),
            "sizes": [format_bytes(found.size_bytes[name]) for _, found in breakdowns],
        }
        for name in CATEGORIES
        if any(found.size_bytes[name] for _, found in breakdowns)
    ]


def _largest(graph: Graph, label: str, found: Breakdown) -> dict[str, Any]:
    rows = []
    for live in found.largest:
        tensor = graph.tensors[live.tensor]
        op = None if live.op is None else graph.ops[live.op]
        rows.append(
            {
                "size": format_bytes(live.size_bytes),
                "shape": shape_and_dtype(tensor),
                "category": _shown(live.category),
                "kind": tensor.role.replace("_", " ") if op is None else op.kind,
                "name": tensor.name if op is None else op.name,
                "layer": "" if live.op is None else layer_of(graph, live.op),
                "source": "" if op is None else op.source,
            }
        )
    return {"caption": f"The {len(rows)} largest tensors at the peak of the {label} step", "rows": rows}


def _layer_rows(graph: Graph, plan: Plan) -> list[dict[str, Any]]:
    layers = recomputed_layers(graph, plan)
    total_s = sum(entry.extra_time_s for entry in layers)
    return [
        {
            "layer": entry.name,
            "kinds": _shown_kinds(entry.kinds),
            "ops": entry.ops,
            "runs": entry.extra_runs,
            "time_s": entry.extra_time_s,
            "time": format_time(entry.extra_time_s),
            "share_value": entry.extra_time_s / total_s if total_s else 0.0,
            "share": f"{entry.extra_time_s / total_s:.1%}" if total_s else "-",
        }
        for entry in layers
    ]


def _shown_kinds(kinds: Sequence[str]) -> str:
    return ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")


def _changes(plan: Plan) -> list[dict[str, str]]:
    """What a plan changes of a step besides running ops again, each in a line."""
    found = []
    if plan.split is not None:
        found.append({"name": "Slices", "text": plan.split.described(plan.baseline_time_s)})
    if plan.update is not None:
        found.append({"name": "Early updates", "text": plan.update.described()})
    if plan.one_by_one:
        found.append({"name": "Order", "text": ONE_BY_ONE})
    return found


def _sliced_rows(graph: Graph, plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer.name,
            "kinds": _shown_kinds(layer.kinds),
            "ops": layer.ops,
            "parts": layer.parts,
            "time_s": layer.time_s,
            "time": format_time(layer.time_s),
        }
        for layer in sliced_layers(graph, plan)
    ]


def _exactness(graph: Graph, plan: Plan) -> list[str]:
    once = Counter(op.kind or "op" for op in graph.ops if not op.recomputable)
    again = recomputed_ops(plan.schedule)
    most = ", ".join(f"{kind} ({count:,})" for kind, count in once.most_common(6))
    found = [
        "A plan runs the same operations on the same inputs; some of them twice. No formula changes, and no mask is "
        "drawn again."
        if plan.split is None
        else "Operations in slices make the same numbers as whole ones, part by part. Sums over slices are made in "
        "another order than in the plain step, so that they differ by rounding. No mask is drawn again.",
        f"{sum(once.values()):,} of the {len(graph.ops):,} operations run exactly once under every plan, because they "
        "draw random numbers, write state, leave the device, make a result, or are not known to be free of side effects"
        + (f": {most}{', ...' if len(once) > 6 else ''}." if most else "."),
        f"Of the other {len(graph.ops) - sum(once.values()):,}, this plan runs {len(again):,} more than once.",
        "The schedule was replayed by a validator that shares no code with the planner, and its peak was counted "
        "twice, by the simulator and by the validator. Both agree.",
    ]
    if not graph.free_order:
        found.append("First runs stand in the framework's own order.")
    found.append("To see it on your own model: remat check trains it plain and planned and compares every number.")
    return found
