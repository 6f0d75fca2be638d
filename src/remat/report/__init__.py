"""Reports of plans: an interactive page (``Report``), tables for the terminal (``text``), pictures (``plots``)."""

from remat.report.report import Report

__all__ = ["Report"]
