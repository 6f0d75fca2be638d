"""``make versions``: pytest's last line is read, and a run that was stopped goes on where it stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.versions import COMBINATIONS, Outcome

from benchmarks import versions
from remat.running.supported import FRAMEWORKS

OUTPUT = """..F.E
FAILED tests/torch/test_torch_apply.py::test_one[a] - AssertionError
FAILED tests/torch/test_torch_apply.py::test_one[b] - AssertionError
ERROR tests/torch/test_torch_models.py - ImportError
2 failed, 119 passed, 3 skipped, 1 error in 63.02s (0:01:03)
"""


def test_the_last_line_of_pytest_is_read():
    assert versions.counted(OUTPUT) == {"failed": 2, "passed": 119, "skipped": 3, "error": 1}
    assert versions.counted(OUTPUT.rpartition("\n2 failed")[0]) == {}
    assert versions.counted("") == {}
    assert versions.counted(OUTPUT + "a library: leaked 514 functions!\n")["passed"] == 119
    assert versions.first_failures(OUTPUT) == "`test_torch_apply.py::test_one`, `test_torch_models.py`"


def test_the_ends_of_every_range_are_tried():
    tried = [one.split("==") for combination in COMBINATIONS for one in combination.versions]
    tried += [one.split("==") for combination in COMBINATIONS for one in combination.without_dependencies]
    for framework in FRAMEWORKS:
        found = {tuple(map(int, version.split(".")[:2])) for package, version in tried if package in framework.packages}
        assert {framework.oldest, framework.newest} <= found, framework.name
    assert len({(one.name, one.front_end) for one in COMBINATIONS}) == len(COMBINATIONS)


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    page = tmp_path / "versions.md"
    page.write_text("Before.\n<!-- table -->\nold\n<!-- end of table -->\nBehind.\n")
    monkeypatch.setattr(versions, "PAGE", page)
    ran = []

    def tested(combination, folder):
        ran.append(combination.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return Outcome(7, 0, 1, "", "2026-01-02")

    monkeypatch.setattr(versions, "tested", tested)
    first, second = (one.name for one in COMBINATIONS[:2])
    with pytest.raises(KeyboardInterrupt):
        versions.main(["--folder", str(tmp_path), first, second])
    versions.main(["--folder", str(tmp_path), first, second])

    assert ran == [first, second, second]
    rows = [line for line in page.read_text().splitlines() if "2026-01-02" in line]
    assert len(rows) == 2
    assert rows[0].endswith("| 7 | 0 | 1 | 2026-01-02 |  |")
    assert page.read_text().startswith("Before.\n<!-- table -->")
    assert page.read_text().endswith("<!-- end of table -->\nBehind.\n")
    versions.main(["--folder", str(tmp_path), first, "--again", first])
    assert ran == [first, second, second, first]
    assert json.loads((tmp_path / f"{first}.PyTorch.json").read_text())["passed"] == 7


def test_a_combination_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        versions.main(["torch-1.0"])
    assert "there is no combination torch-1.0" in capsys.readouterr().err
