"""Layers under ``lax.scan``: their two loops found, joined, and written again so that they keep less."""
