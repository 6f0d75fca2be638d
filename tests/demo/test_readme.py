"""What the README and the examples show is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def snippets() -> dict[str, str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", text, flags=re.DOTALL))


def run_python(*args: str) -> str:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_python_block_of_the_readme_is_run() -> None:
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").count("```python")
    assert blocks == len(snippets()) == 4


def test_the_keras_example_is_short_and_prints_a_plan_that_recomputes() -> None:
    code = snippets()["keras"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    printed = run_python("-c", code)
    assert "remat plan by 'auto'" in printed
    assert re.search(r"recomputed +[1-9]\d* of", printed)


def test_the_gradient_tape_example_recomputes_and_returns_a_loss(tmp_path: Path) -> None:
    kept = "    global plan\n    plan = tape.plan\n    return loss\n"
    script = tmp_path / "example.py"  # tf.function needs a file to read the source from.
    script.write_text(snippets()["tensorflow"].replace("    return loss\n", kept) + "\nassert plan.recomputed > 0\n")
    assert run_python(str(script)).startswith("tf.Tensor(")


def test_the_jax_example_recomputes_within_its_budget() -> None:
    code = snippets()["jax"] + "\nassert gradients.plan.peak_bytes <= gradients.plan.budget_bytes\n"
    printed = run_python("-c", code)
    assert re.search(r"recomputed +[1-9]\d* of", printed)


def test_the_torch_example_recomputes_within_its_budget() -> None:
    code = snippets()["torch"] + "\nassert plan.peak_bytes <= plan.budget_bytes\n"
    printed = run_python("-c", code)
    assert re.search(r"recomputed +[1-9]\d* of", printed)


EXAMPLES = {
    "huggingface_trainer.py": "60%",
    "jax_training.py": "60%",
    "keras_fit.py": "50%",
    "lightning_training.py": "60%",
    "torch_training.py": "60%",
}


TRAINERS = ("huggingface_trainer.py", "lightning_training.py")  # Their libraries alone take seconds to import.


@pytest.mark.parametrize(
    ("name", "budget"),
    [pytest.param(*one, marks=pytest.mark.slow) if one[0] in TRAINERS else one for one in EXAMPLES.items()],
)
def test_every_example_runs(name: str, budget: str) -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
    assert "remat plan by 'auto'" in run_python(str(ROOT / "examples" / name), budget)


@pytest.mark.parametrize("document", ["README.md", "docs/README.md"])
def test_links_and_pictures_lead_somewhere(document: str) -> None:
    path = ROOT / document
    targets = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert targets
    for target in targets:
        assert (path.parent / target).exists(), target
    for picture in (ROOT / "docs" / "images").glob("*.png"):
        assert picture.stat().st_size < 150_000
