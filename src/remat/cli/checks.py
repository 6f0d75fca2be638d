"""What commands make sure of before they spend minutes."""

from __future__ import annotations

from pathlib import Path

from remat.cli.console import CommandError


def check_planner(name: str) -> None:
    """Make sure that a planner exists.

    Raises:
        CommandError: if not; the message lists the names.
    """
    from remat.planners import get_planner

    try:
        get_planner(name)
    except ValueError as error:
        raise CommandError(f"--planner {name}: {error}") from error


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """Make sure that matplotlib can write a picture of this name.

    Raises:
        CommandError: if not; the message lists the formats.
    """
    if path is None:
        return
    from remat.report import plots

    try:
        plots.check_picture_path(path)
    except ValueError as error:
        raise CommandError(f"{option} {error}") from error
