"""What mkdocs does with a page before it reads the Markdown."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Take the marks for the tests (``run``, ``slow``, ``framework=jax``) out of the lines that open a code block.

    GitHub ignores them, and the highlighter of the site would not know the block for one.
    """
    return re.sub(r"^```(\w+)((?: (?:run|slow|framework=\w+))*)", r"```\1", markdown, flags=re.MULTILINE)
