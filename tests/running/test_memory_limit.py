"""Limits of control groups, read from folders as both versions lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.running import machine, memory_limit

GIB = 1 << 30


def _process(folder: Path, groups: str, mounts: list[tuple[str, Path, str, str]]) -> Path:
    """What the system says of a process: its groups, and where (root, folder, version, controllers) they are."""
    process = folder / "self"
    process.mkdir()
    (process / "cgroup").write_text(groups)
    lines = ["19 1 0:5 / / rw - ext4 /dev/sda1 rw"]
    for number, (root, mount, kind, options) in enumerate(mounts, 20):
        escaped = str(mount).replace(" ", r"\040")
        lines.append(f"{number} 19 0:{number} {root} {escaped} rw,nosuid shared:{number} - {kind} {kind} {options}")
    (process / "mountinfo").write_text("\n".join(lines) + "\n")
    return process


def _group_2(folder: Path, limit: int | None, used: int = 0, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\nactive_file 7\n")


def _group_1(folder: Path, limit: int, used: int = 0, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {cached}\n")


def test_a_limit_of_a_group_above_binds(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _group_2(mount / "jobs", 6 * GIB, used=5 * GIB, cached=2 * GIB)
    _group_2(mount / "jobs" / "step 0", 8 * GIB, used=1 * GIB)
    _group_2(mount / "others", 1 * GIB)
    process = _process(tmp_path, "0::/jobs/step 0\n", [("/", mount, "cgroup2", "rw")])
    assert memory_limit.limit_bytes(process) == 6 * GIB
    assert memory_limit.left_bytes(process) == 3 * GIB


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _group_2(mount, 2 * GIB, used=3 * GIB)
    process = _process(tmp_path, "0::/\n", [("/", mount, "cgroup2", "rw")])
    assert memory_limit.limit_bytes(process) == 2 * GIB
    assert memory_limit.left_bytes(process) == 0


@pytest.mark.parametrize("root", ["/docker/abc", "/elsewhere"])
def test_a_container_whose_path_is_the_host_s(tmp_path: Path, root: str) -> None:
    mount = tmp_path / "a folder" / "memory"
    _group_1(mount, 4 * GIB, used=1 * GIB, cached=GIB // 2)
    groups = "9:cpu,cpuacct:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/\n"
    cpu = tmp_path / "cpu"
    _group_1(cpu, 1)  # Not a folder of the memory's groups.
    process = _process(tmp_path, groups, [(root, cpu, "cgroup", "rw,cpu"), (root, mount, "cgroup", "rw,memory")])
    assert memory_limit.limit_bytes(process) == 4 * GIB
    assert memory_limit.left_bytes(process) == 4 * GIB - GIB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_no_limit(tmp_path: Path, version: int) -> None:
    mount = tmp_path / "cgroup"
    if version == 1:
        _group_1(mount, (1 << 63) - 4096, used=GIB)
        process = _process(tmp_path, "4:memory:/\n", [("/", mount, "cgroup", "rw,memory")])
    else:
        _group_2(mount, None, used=GIB)
        process = _process(tmp_path, "0::/\n", [("/", mount, "cgroup2", "rw")])
    assert memory_limit.limit_bytes(process) is None
    assert memory_limit.left_bytes(process) is None


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert memory_limit.limit_bytes(tmp_path) is None
    assert memory_limit.left_bytes(tmp_path) is None


def test_the_machine_s_memory_is_at_most_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, free = machine.memory_bytes(), machine.available_bytes()
    assert whole is not None
    assert free is not None
    assert 0 < free < whole
    monkeypatch.setattr(memory_limit, "limit_bytes", lambda: 2 << 20)
    monkeypatch.setattr(memory_limit, "left_bytes", lambda: 1 << 20)
    assert machine.memory_bytes() == 2 << 20
    assert machine.available_bytes() == 1 << 20
