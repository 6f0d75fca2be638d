"""The site is whole: every page is in the navigation, every link leads somewhere, every public name is explained."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mkdocs_hooks
import pytest
import yaml

from remat.planners import planner_names
from snippets import DOCS, ROOT

PACKAGE = ROOT / "src" / "remat"
EARLIER_NAMES = {"joint_plan_of"}  # They stay for programs that call them.
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*DOCS.rglob("*.md"), *ROOT.glob("*.md")))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def title_of(page: Path) -> str:
    return text_of(page).partition("\n")[0].removeprefix("# ")


def links(page: Path) -> list[tuple[str, str]]:
    """The text and the target of each link and picture that leads to a file."""
    return re.findall(r"\[([^\]]*)\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(page))


def navigation(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in inner for page in navigation(entry)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_and_every_planner_has_one() -> None:
    listed = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])

    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert {f"planners/{name}.md" for name in planner_names()} <= set(listed)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for _, target in links(path):
        assert (path.parent / target).exists(), target


def test_the_home_page_shows_a_small_picture_and_names_pages_by_their_titles() -> None:
    home = DOCS / "README.md"
    pages = [(text, DOCS / target) for text, target in links(home) if target.endswith(".md")]

    assert "](images/memory.png)" in text_of(home)
    assert all(picture.stat().st_size < 150_000 for picture in (DOCS / "images").glob("*.png"))
    assert len({page for _, page in pages}) >= 10
    assert [text for text, _ in pages] == [title_of(page) for _, page in pages]


@pytest.mark.parametrize(
    ("page", "package"),
    [("core", ""), *((name, name) for name in ("jax", "keras", "paddle", "tensorflow", "torch"))],
)
def test_the_reference_explains_every_public_function(page: str, package: str) -> None:
    init = ast.parse(text_of(PACKAGE / package / "__init__.py"))
    (public,) = (
        ast.literal_eval(node.value)
        for node in init.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    prefix = ".".join(("remat", *([package] if package else [])))
    explained = set(re.findall(rf"^::: {prefix}\.(\w+)$", text_of(DOCS / "reference" / f"{page}.md"), re.MULTILINE))

    # Users do not make the classes: the functions that return them explain them.
    functions = {name for name in public if name.islower() and not name.startswith("_")}
    assert functions - EARLIER_NAMES <= explained


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    folders = [ROOT / name for name in ("src/remat", "tests", "docs", "examples", "benchmarks")]
    sources = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in folder.rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", text_of(ROOT / page)):
        if not name.startswith("my_"):  # A file of the reader's own.
            assert any(source.endswith(f"/{name}") for source in sources), name


def test_marks_for_the_tests_do_not_reach_the_site() -> None:
    page = (
        '```python not-run\na\n```\n```console framework=jax slow\nb\n```\n```python title="x.py"\nc\n```\n```\nd\n```'
    )

    shown = mkdocs_hooks.on_page_markdown(page)

    assert shown == '```python\na\n```\n```console\nb\n```\n```python title="x.py"\nc\n```\n```\nd\n```'


def test_headings_between_the_marks_become_tabs() -> None:
    one = "### One\n\n```python\nx\n\ny\n```\n\n"
    page = f"a\n<!-- tabs -->\n\n{one}### Two\n\nz\n\n<!-- end of tabs -->\n\n### Not a tab\n"

    shown = mkdocs_hooks.on_page_markdown(page)

    tab = '=== "One"\n\n    ```python\n    x\n\n    y\n    ```\n\n'
    assert shown == f'a\n{tab}=== "Two"\n\n    z\n\n\n### Not a tab\n'


@pytest.mark.parametrize("page", sorted(path.stem for path in (DOCS / "reference").glob("*.md")))
def test_the_reference_names_what_is_there(page: str) -> None:
    shown = mkdocs_hooks.on_page_markdown(text_of(DOCS / "reference" / f"{page}.md"))

    names = re.findall(r"^::: (.+)$", shown, re.MULTILINE)
    assert names
    for name in names:
        assert is_defined(name), name


def is_defined(name: str) -> bool:
    """Is it a module of ours, or a function or class that a module of ours defines?"""
    module = ROOT / "src" / Path(*name.split("."))
    if module.with_suffix(".py").exists():
        return True
    source = module.parent.with_suffix(".py")
    return source.exists() and bool(re.search(rf"^(def|class) {module.name}\b", text_of(source), re.MULTILINE))


def test_the_check_above_can_fail() -> None:
    assert is_defined("remat.core.errors")
    assert is_defined("remat.core.graph.Graph")
    assert not is_defined("remat.core.graph.graph")
    assert not is_defined("remat.core.nothing")
