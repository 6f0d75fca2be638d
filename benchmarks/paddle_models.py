"""Whole models of Paddle within budgets, each way to train: ``python -m benchmarks.paddle_models``.

Runs ``tests/paddle/test_paddle_models.py``, which trains each model five steps plainly and within its budget and
compares them to the bit, in a process of its own for each way and model, and writes what the tests noted to
``benchmarks/results``. ``--only TEXT`` runs the processes whose " way model " holds the text; the others' lines stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from remat.running import machine

ROOT: Final = Path(__file__).parents[1]
TARGET: Final = ROOT / "benchmarks" / "results" / "paddle-models"
TESTS: Final = ROOT / "tests" / "paddle" / "test_paddle_models.py"
WAYS: Final = ("static", "to_static", "fit")
_FLOAT32: Final = ("resnet50", "mobilenet_v2", "bert", "gpt", "lstm", "unet")
MODELS: Final = (*_FLOAT32, "bert_bfloat16", "gpt_bfloat16", "bert_amp", "gpt_amp")
BUDGETS: Final = ("70%", "50%", "smallest")
LIMIT_S: Final = 1800  # ResNet-50 takes three minutes on an idle core.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help='a part of " way model ", such as "fit bert"')
    only = parser.parse_args().only
    for way in WAYS:
        for model in MODELS:
            if only in f" {way} {model} ":
                started = time.time()
                lines = measured(way, model)
                if not lines:
                    print(f"{way} {model} does not run on this machine", flush=True)
                    continue
                keep(way, model, lines)
                print(*map(as_row, lines), f"{time.time() - started:.0f} s", sep="\n", flush=True)


def measured(way: str, model: str) -> list[dict[str, Any]]:
    """A line for each budget."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        wanted = [f"{TESTS}::test_a_model_keeps_its_budget_with_the_same_numbers[{way}-{model}-{b}]" for b in BUDGETS]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *wanted],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"the tests of {way} {model} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        cases = ElementTree.parse(report).iter("testcase")
        return [line_of(way, model, case) for case in cases]


def line_of(way: str, model: str, case: ElementTree.Element) -> dict[str, Any]:
    """What one test noted."""
    budget = case.attrib["name"].partition("[")[2].removesuffix("]").rpartition("-")[2]
    line: dict[str, Any] = {"way": way, "model": model, "budget": budget}
    for one in case.iter("property"):
        text = one.attrib["value"]
        line[one.attrib["name"]] = text if one.attrib["name"] == "told" else float(text)
    failure = next(case.iter("failure"), None)
    if failure is not None:
        line["failure"] = failure.attrib.get("message", "").splitlines()[0]
    return line


def keep(way: str, model: str, lines: Iterable[dict[str, Any]]) -> None:
    """Put lines in the place of the earlier ones of the same way and model."""
    path = TARGET.with_suffix(".json")
    table = json.loads(path.read_text()) if path.exists() else {"lines": []}
    kept = [one for one in table["lines"] if (one["way"], one["model"]) != (way, model)]
    order = {key: number for number, key in enumerate((w, m, b) for w in WAYS for m in MODELS for b in BUDGETS)}
    table = {"machine": machine.described(), "versions": machine.versions(), "lines": [*kept, *lines]}
    table["lines"].sort(key=lambda one: order.get((one["way"], one["model"], one["budget"]), len(order)))
    path.write_text(json.dumps(table, indent=1) + "\n")
    TARGET.with_suffix(".md").write_text(page(table))


def page(table: dict[str, Any]) -> str:
    """The table as Markdown."""
    where = table["machine"]
    versions = ", ".join(f"{name} {table['versions'][name]}" for name in ("python", "remat", "paddlepaddle", "numpy"))
    text = [
        "# Models of Paddle within budgets, five steps each",
        "",
        f"{where['system']} {where['processor']}, {where['cores']} cores; {versions}. Written by "
        "`python -m benchmarks.paddle_models`.",
        "",
        "Losses, parameters and statistics of every line are equal to plain training's to the bit. Bytes are in MB; "
        '"measured" is the largest of all steps, under `fit` that of the first step under the newest plan. "bfloat16": '
        'what every CPU runs in it, such as dropout and embeddings; "AMP": Paddle\'s own lists of level O1, which need '
        "AVX-512 BF16.",
        "",
        "| way | model | budget | bytes | plain | predicted | measured | more time, predicted |",
        "|---|---|---|---|---|---|---|---|",
        *map(as_row, table["lines"]),
    ]
    return "\n".join(text) + "\n"


def as_row(line: dict[str, Any]) -> str:
    """One line of the table."""
    model = line["model"].replace("_bfloat16", ", bfloat16").replace("_amp", ", AMP")
    start = f"| `{line['way']}` | {model} | {line['budget']} |"
    if "failure" in line:
        return f"{start} fails: {line['failure'].replace('|', '/')} | | | | |"
    if "smallest_bytes" in line:
        return f"{start} refused: the smallest is {line['smallest_bytes'] / 1e6:.2f} | | | | |"
    figures = [line[f"{name}_bytes"] / 1e6 for name in ("budget", "plain", "predicted", "measured")]
    return f"{start} {' | '.join(f'{figure:.2f}' for figure in figures)} | {line['overhead']:.0%} |"


if __name__ == "__main__":
    main()
