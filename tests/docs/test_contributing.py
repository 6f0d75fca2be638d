"""CONTRIBUTING.md is true: its map names every folder in the order of the imports, and its paths exist."""

from __future__ import annotations

import importlib.util
import re

import remat
from snippets import ROOT

PACKAGE = ROOT / "src" / "remat"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def mapped_folders() -> list[str]:
    return re.findall(r"^\| `([\w/]+)/` \|", section("The map"), re.MULTILINE)


def layers() -> tuple[tuple[str, ...], ...]:
    """The order that the test of the imports proves."""
    spec = importlib.util.spec_from_file_location("imports_of_remat", ROOT / "tests" / "core" / "test_imports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: tuple[tuple[str, ...], ...] = module.LAYERS
    return found


def test_the_map_names_every_folder() -> None:
    folders = {path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__"}

    assert sorted(mapped_folders()) == sorted(path.relative_to(PACKAGE).as_posix() for path in folders)


def test_the_map_is_in_the_order_of_the_imports() -> None:
    level = {name: number for number, names in enumerate(layers()) for name in names}
    levels = [level[folder.partition("/")[0]] for folder in mapped_folders()]

    assert levels == sorted(levels)


def test_the_files_that_the_map_names_exist() -> None:
    for folder, files in re.findall(r"^\| `([\w/]+)/` \|(.*)\|$", section("The map"), re.MULTILINE):
        for name in re.findall(r"`(\w+)`", files):
            if folder in ("core", "planning", "fit", "cli"):
                assert (PACKAGE / folder / f"{name}.py").exists(), f"{folder}/{name}"


def test_every_path_exists() -> None:
    paths = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./]*)`", TEXT)
    assert len(paths) >= 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_every_module_exists() -> None:
    """Dotted names, and files of the front ends as the way of a step names them."""
    dotted = re.findall(r"`(remat(?:\.\w+)+)`", TEXT)
    assert dotted
    for name in dotted:
        _, first, *_ = parts = name.split(".")
        while len(parts) > 2 and not is_module(parts):
            parts.pop()
        assert first in remat.__all__ or is_module(parts), name
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", section("The way of a step"))
    assert files
    for file in files:
        assert (PACKAGE / file).exists(), file


def is_module(parts: list[str]) -> bool:
    path = PACKAGE.parent.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


def test_every_function_of_a_way_is_in_its_file() -> None:
    """Each ``name`` that stands with its file, ``folder/file.py``: ``name``, is defined there."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`:\s+`(\w+(?:\.\w+)?)`", section("The way of a step"))
    assert len(named) >= 30
    for file, name in named:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), f"{file}: {name}"


def test_the_glossary_gives_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", section("Words"), re.MULTILINE)
    words = [word.strip() for row in rows if row != "word" for word in row.split(",")]

    assert len(words) >= 40
    assert len(set(words)) == len(words)
