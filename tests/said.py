"""What remat told the user while a test ran."""

from __future__ import annotations

import pytest


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of remat's own log: other libraries log too, and other tests may have let plans be logged."""
    records = [record for record in caplog.records if record.name == "remat" and record.levelname == "WARNING"]
    return [record.getMessage() for record in records]
