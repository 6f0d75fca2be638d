"""The new snippets of the guide run, each in a namespace of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
SNIPPETS = re.findall(r"```python run\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_has_snippets() -> None:
    assert len(SNIPPETS) >= 6


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet(number: int) -> None:
    exec(compile(SNIPPETS[number], f"{PAGE.name} snippet {number}", "exec"), {"__name__": "snippet"})
