"""What mkdocs does with a page before it reads the Markdown.

The pages are written so that GitHub shows them well. What only the site has is made here.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).parent / "src"

_TEST_MARKS = re.compile(r"^```(\w+)((?: (?:not-run|slow|framework=\w+))*)", re.MULTILINE)
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", re.MULTILINE | re.DOTALL)
_TAB = re.compile(r"^### (.+)\n", re.MULTILINE)
_PUBLIC_NAME = re.compile(r"^::: (remat(?:\.\w+)*)\.(\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as the site needs it."""
    return _with_tabs(_with_definitions(_without_test_marks(markdown)))


def _without_test_marks(markdown: str) -> str:
    """Take the marks for the tests (``not-run``, ``slow``, ``framework=jax``) out of the lines that open a code block.

    GitHub ignores them. The site's highlighter would not recognise the block's language.
    """
    return _TEST_MARKS.sub(r"```\1", markdown)


def _with_tabs(markdown: str) -> str:
    """Make a tab of each heading of level 3 between ``<!-- tabs -->`` and ``<!-- end of tabs -->``.

    GitHub has no tabs: it shows the headings one below the other.
    """

    def tabs(found: re.Match[str]) -> str:
        _, *sections = _TAB.split(found[1])
        titles, bodies = sections[::2], sections[1::2]
        return "".join(
            f'=== "{title}"\n\n{textwrap.indent(body.strip(), "    ")}\n\n'
            for title, body in zip(titles, bodies, strict=True)
        )

    return _TABS.sub(tabs, markdown)


def _with_definitions(markdown: str) -> str:
    """Name the module that defines each public name of the reference: ``remat.plan`` is in ``remat.planning.plan``.

    mkdocstrings finds most public names by itself. But it takes ``remat.torch.compile`` for the folder of that name.
    """

    def definition(found: re.Match[str]) -> str:
        package, name = found.groups()
        init = _SOURCES.joinpath(*package.split("."), "__init__.py")
        module = _imported_from(init).get(name, package) if init.exists() else package
        return f"::: {module}.{name}"

    return _PUBLIC_NAME.sub(definition, markdown)


def _imported_from(init: Path) -> dict[str, str]:
    """The module that each name of a package is imported from."""
    imports = (node for node in ast.walk(ast.parse(init.read_text())) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}
