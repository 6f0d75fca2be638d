"""Decisions about storages turned into a schedule, and schedules improved run by run."""
