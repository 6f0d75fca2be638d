"""The process that the tests of a framework share."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_process import WorkerProcess

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from worker_process import serve

def add(a, b=1):
    print("noise")
    return {{"sum": a + b, "process": os.getpid()}}

def end():
    os._exit(3)

serve({{"add": add, "end": end}})
"""


@pytest.fixture
def asked(tmp_path: Path) -> WorkerProcess:
    script = tmp_path / "adds.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    return WorkerProcess(script)


def test_one_process_answers_many_cases(asked: WorkerProcess) -> None:
    first, second = asked.ask("add", 1), asked.ask("add", 2, b=3)
    assert (first["sum"], second["sum"]) == (2, 5)
    assert first["process"] == second["process"]


def test_an_error_is_the_error_of_the_test_and_the_process_goes_on(asked: WorkerProcess) -> None:
    with pytest.raises(AssertionError, match="TypeError"):
        asked.ask("add", "one")
    assert asked.ask("add", 1)["sum"] == 2


def test_a_process_that_ends_is_told_from_one_that_answers(asked: WorkerProcess) -> None:
    with pytest.raises(AssertionError, match=r"adds\.py ended at end"):
        asked.ask("end")
