"""The batch at which ``remat check`` trains: the largest half, quarter and so on that fits into the free memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import remat
from remat.cli import step_commands
from remat.running import machine
from remat.testing import chain

MIB = 1 << 20


@pytest.fixture
def free(monkeypatch):
    """Sets the free memory, in MiB; the step is a chain with one MiB a tensor for each sample."""

    def traced(source, workload):
        assert source.batch_size == workload.batch_size
        return chain(8, size_bytes=source.batch_size * MIB)

    monkeypatch.setattr(step_commands, "traced", traced)
    monkeypatch.setattr(
        step_commands, "workload_from_source", lambda source: SimpleNamespace(batch_size=source.batch_size)
    )
    return lambda mib: monkeypatch.setattr(machine, "available_bytes", lambda: mib * MIB)


@pytest.fixture
def checked(monkeypatch):
    """The batches at which a check was made; instead of making it, it fails."""
    batches = []

    def run_step_job(job, source, **wanted):
        batches.append(source.batch_size)
        raise step_commands.CommandError(f"no {job} in this test")

    monkeypatch.setattr(step_commands, "run_step_job", run_step_job)
    return batches


def test_batch_is_halved_until_step_and_copies_fit(fails, free, checked):
    graph = chain(8, size_bytes=MIB)
    needed = remat.simulate(graph, graph.plain_schedule).peak_bytes // MIB + 3  # And three copies of what is pinned.
    for samples, mib in ((64, 64 * needed / 0.6 + 1), (32, 64 * needed / 0.6 - 1), (8, 8 * needed / 0.6 + 1)):
        free(int(mib))
        fails("check", "my_steps:build", "--batch-size", 64)
        assert checked.pop() == samples


def test_machine_too_small_for_one_sample(fails, free, checked):
    free(10)
    assert "10 MiB are free here" in fails("check", "my_steps:build", "--batch-size", 64)
    assert not checked


def test_nothing_is_halved_where_no_memory_is_known(fails, free, checked, monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: None)
    fails("check", "my_steps:build", "--batch-size", 64)
    assert checked == [64]
