"""The command line: ``plan``, ``frontier``, ``simulate``, ``report``, ``measure``, ``check``, ``doctor`` and ``demo``.

It imports a front end only when a command needs it, so that graph files are planned with no framework installed. Read
in this order: ``app``, ``options``, ``source`` (a model by name -> a training step), then a file of commands.
"""

from __future__ import annotations

from remat.cli.app import app, main

__all__ = ["app", "main"]
