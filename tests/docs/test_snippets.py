"""What the README, the documentation and the examples show is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snippets import DOCS, ROOT, Snippet, run_script, snippets

# The blocks of this page are parts of a program, shown to explain; tests of the front ends run the whole.
PAGES_OF_PARTS = {DOCS / "micro_batches.md"}
# These repeat the README's blocks, as a test below says.
HOME_PAGE = DOCS / "README.md"
# Pages whose snippets run in the quick tests, too.
QUICK_PAGES = ("docs/coming-from.md",)
# What users run first is never left to the longer checks.
FIRST_PAGES = ("docs/quick-start/",)

README = {snippet.framework: snippet for snippet in snippets(ROOT / "README.md")}
ALL = [
    snippet
    for page in sorted(DOCS.rglob("*.md"))
    if page not in {*PAGES_OF_PARTS, HOME_PAGE}
    for snippet in snippets(page)
]
WITHOUT_FRAMEWORK = [snippet for snippet in ALL if not snippet.framework]
OF_FRAMEWORKS = [snippet for snippet in ALL if snippet.framework]

EXAMPLES = {
    "cluster_plan.py": ("torch", "60%"),
    "huggingface_trainer.py": ("torch", "60%"),
    "jax_training.py": ("jax", "60%"),
    "keras_fit.py": ("keras", "50%"),
    "lightning_training.py": ("torch", "60%"),
    "torch_training.py": ("torch", "60%"),
}
TRAINERS = ("huggingface_trainer.py", "lightning_training.py")  # Their libraries alone take seconds to import.


def marked(snippet: Snippet) -> object:
    if snippet.page.startswith(FIRST_PAGES) and not snippet.is_slow:
        marks = [pytest.mark.thorough]
        if snippet.framework in ("keras", "tensorflow"):
            marks.append(pytest.mark.other_cpu)
    else:
        marks = [] if snippet.page in QUICK_PAGES and not snippet.is_slow else [pytest.mark.slow]
    return pytest.param(snippet, id=str(snippet), marks=marks)


def test_there_is_something_to_run() -> None:
    assert set(README) == {"keras", "tensorflow", "jax", "torch"}
    assert len(WITHOUT_FRAMEWORK) >= 14
    assert {snippet.framework for snippet in OF_FRAMEWORKS} == {"keras", "tensorflow", "jax", "paddle", "torch"}
    assert len([snippet for snippet in OF_FRAMEWORKS if snippet.page in QUICK_PAGES]) >= 6


def test_the_home_page_shows_the_snippets_of_the_readme() -> None:
    assert {snippet.framework: snippet.code for snippet in snippets(HOME_PAGE)} == {
        framework: snippet.code for framework, snippet in README.items()
    }


def test_a_first_plan_takes_about_ten_lines() -> None:
    lines = {name: len([line for line in one.code.splitlines() if line.strip()]) for name, one in README.items()}
    assert lines["keras"] <= 10
    assert max(lines.values()) <= 12


@pytest.mark.parametrize("page", sorted({snippet.page for snippet in WITHOUT_FRAMEWORK}))
def test_snippets_that_need_no_framework(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, each in a namespace of its own: starting Python for each would cost more than they do."""
    monkeypatch.chdir(tmp_path)
    for snippet in WITHOUT_FRAMEWORK:
        if snippet.page == page:
            assert snippet.language == "python", snippet
            exec(compile(snippet.code, str(snippet), "exec"), {"__name__": "snippet"})


@pytest.mark.other_cpu
def test_the_keras_snippet_prints_a_plan_that_recomputes(tmp_path: Path) -> None:
    printed = README["keras"].run(tmp_path)
    assert "remat plan by 'auto'" in printed
    assert re.search(r"recomputed +[1-9]\d* of", printed)


@pytest.mark.other_cpu
def test_the_tensorflow_snippet_recomputes_and_returns_a_loss(tmp_path: Path) -> None:
    kept = "    global plan\n    plan = tape.plan\n    return loss\n"
    code = README["tensorflow"].code.replace("    return loss\n", kept)
    (tmp_path / "snippet.py").write_text(f"{code}\nassert plan.recomputed > 0\n")
    assert run_script("tensorflow", tmp_path / "snippet.py").startswith("tf.Tensor(")


@pytest.mark.parametrize(("framework", "plan"), [("jax", "gradients.plan"), ("torch", "plan")])
def test_the_snippet_recomputes_within_its_budget(framework: str, plan: str, tmp_path: Path) -> None:
    printed = README[framework].run(tmp_path, after=f"\nassert {plan}.peak_bytes <= {plan}.budget_bytes\n")
    assert re.search(r"recomputed +[1-9]\d* of", printed)


def test_the_jax_snippet_saves_what_it_says(tmp_path: Path) -> None:
    """In the program that a plain ``jax.jit`` compiles."""
    measured = """

def bytes_of(step):
    memory = jax.jit(step).lower(weights, jnp.ones((1024, 64))).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


assert bytes_of(gradients) <= 0.7 * bytes_of(jax.value_and_grad(loss))
"""
    README["jax"].run(tmp_path, after=measured)


@pytest.mark.parametrize("snippet", [marked(snippet) for snippet in OF_FRAMEWORKS])
def test_snippets_of_the_frameworks(snippet: Snippet, tmp_path: Path) -> None:
    snippet.run(tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in TRAINERS else name for name in EXAMPLES]
)
def test_every_example_runs(name: str) -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
    framework, budget = EXAMPLES[name]
    said = "parameters on 8 devices" if name == "cluster_plan.py" else "remat plan by 'auto'"
    assert said in run_script(framework, ROOT / "examples" / name, budget)
