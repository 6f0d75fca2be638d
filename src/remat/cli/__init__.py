"""The command line: ``remat plan``, ``remat frontier``, ``remat simulate``, ``remat demo``.

This package alone knows both ends, the core and the front ends; it imports a front end only when a command needs it.
"""

from __future__ import annotations

from remat.cli.app import app, main

__all__ = ["app", "main"]
