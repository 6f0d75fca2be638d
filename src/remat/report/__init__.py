"""Reports of plans and timelines for people: tables in the terminal (``text``) and pictures (``plots``)."""
