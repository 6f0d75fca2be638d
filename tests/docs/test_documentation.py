"""The site is whole, and what it shows runs. Pages with tests of their own are run there."""

from __future__ import annotations

import re
from pathlib import Path

import mkdocs_hooks
import pytest
import yaml
from snippets import DOCS, Snippet, snippets

from remat.planners import planner_names

ROOT = DOCS.parent
# Their blocks are parts of a program, shown to explain; tests of the front ends run the whole.
EXPLAINED_ELSEWHERE = {"coming-from.md", "micro_batches.md"}


def pages() -> list[Path]:
    return sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).as_posix() not in EXPLAINED_ELSEWHERE)


ALL = [snippet for page in pages() for snippet in snippets(page)]
QUICK = [snippet for snippet in ALL if not snippet.framework]
SLOW = [snippet for snippet in ALL if snippet.framework]


def name_of(snippet: Snippet) -> str:
    return f"{snippet.page}-{snippet.number}"


def test_there_is_something_to_run() -> None:
    assert len(QUICK) >= 14
    assert {snippet.framework for snippet in SLOW} >= {"jax", "keras", "tensorflow"}


@pytest.mark.parametrize("page", sorted({snippet.page for snippet in QUICK}))
def test_snippets_that_need_no_framework(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, each in a namespace of its own: starting Python for each would cost more than they do."""
    monkeypatch.chdir(tmp_path)
    for snippet in QUICK:
        if snippet.page == page:
            assert snippet.language == "python", name_of(snippet)
            exec(compile(snippet.code, name_of(snippet), "exec"), {"__name__": "snippet"})


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SLOW, ids=name_of)
def test_snippets_of_the_frameworks(snippet: Snippet, tmp_path: Path) -> None:
    snippet.run(tmp_path)


def navigation(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in inner for page in navigation(entry)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_and_every_planner_has_one() -> None:
    listed = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])

    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert {f"planners/{name}.md" for name in planner_names()} <= set(listed)


@pytest.mark.parametrize("page", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_marks_for_the_tests_do_not_reach_the_site() -> None:
    page = '```python run\na\n```\n```console framework=jax slow\nb\n```\n```python title="x.py"\nc\n```\n```\nd\n```'

    shown = mkdocs_hooks.on_page_markdown(page)

    assert shown == '```python\na\n```\n```console\nb\n```\n```python title="x.py"\nc\n```\n```\nd\n```'
