"""Reports of plans for people: an interactive page (``Report``), tables in the terminal (``text``), pictures (``plots``)."""

from remat.report.report import Report

__all__ = ["Report"]
