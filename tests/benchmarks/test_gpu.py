"""The measurements for a GPU run, go on where they stopped, and say what they left out; here on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.library import repeated
from benchmarks.gpu.tables import write

ROOT = Path(__file__).parents[2]


def run(out: Path, *options: str, expect: int = 0) -> str:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--name", "here", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def results(out: Path) -> dict:
    return json.loads((out / "gpu-here.json").read_text())


def test_without_a_gpu_it_says_what_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said = run(tmp_path, expect=1)
    assert said.strip() == "there is no CUDA device here (nvidia-smi names none); try --device cpu --small"


def test_a_part_without_time_names_what_it_skipped(tmp_path: Path) -> None:
    said = run(tmp_path, "--device", "cpu", "--small", "--limit-s", "1", "--parts", "host", "--frameworks", "torch")
    assert "skipped for time: host/torch/eager" in said
    assert results(tmp_path)["skipped"] == ["host/torch/eager"]
    assert "Skipped for want of time: host/torch/eager." in (tmp_path / "gpu-here.md").read_text()


def test_what_is_whole_is_not_measured_again(tmp_path: Path) -> None:
    whole = [{"name": "plain", "ops": 1, "forward_us": 1.0, "backward_us": 2.0}]
    (tmp_path / "gpu-here.json").write_text(json.dumps({"cases": {"host/torch/eager": whole}}))
    said = run(tmp_path, "--device", "cpu", "--small", "--parts", "host", "--frameworks", "torch")
    assert "skipped" not in said
    assert results(tmp_path)["cases"] == {"host/torch/eager": whole}
    assert "| plain | 1.0 | 2.0 |" in (tmp_path / "gpu-here.md").read_text()
    assert (tmp_path / "gpu-here.png").read_bytes().startswith(b"\x89PNG")


def test_a_sample_is_repeated_and_what_belongs_to_none_stays() -> None:
    places = torch.zeros(4, 3)
    batch = {"ids": torch.tensor([[1], [2]]), "labels": torch.tensor([5, 6]), "places": places, "return_loss": True}
    found = repeated(batch, 2, "cpu")
    assert found["ids"].tolist() == [[1], [1], [2], [2]]
    assert found["labels"].tolist() == [5, 5, 6, 6]
    assert torch.equal(found["places"], places)
    assert found["return_loss"] is True


def test_a_step_above_its_budget_is_told_from_one_that_says_so(tmp_path: Path) -> None:
    def line(peak: int, said: str) -> dict:
        sizes = {"budget_bytes": 1000, "predicted_bytes": 990, "peak_bytes": peak}
        return {"name": "remat, 60%", **sizes, "difference": 0.0, "equal_bits": True, "mode": "graph", "said": said}

    told = "The first step took 3 MiB more than was predicted"
    lines = [line(1000, told), line(1020, told), line(1020, "")]
    machine = {"system": "Linux", "processor": "x86_64", "cores": 2}
    results = {"device": "x", "date": "", "machine": machine, "versions": {}, "small": True, "skipped": []}
    write(tmp_path / "x", results | {"cases": {"library/torch/limit/GPT-2": lines}})
    rows = [row for row in (tmp_path / "x.md").read_text().splitlines() if row.startswith("| GPT-2 limit")]
    assert [row.split("|")[-2].strip() for row in rows] == ["graph", "graph; it says so", "graph; without a word"]


@pytest.mark.slow
def test_models_of_libraries(tmp_path: Path) -> None:
    run(tmp_path, "--device", "cpu", "--small", "--frameworks", "torch", "--parts", "library", "--only", "/DistilBERT")
    cases = results(tmp_path)["cases"]
    assert sorted(cases) == ["library/torch/eager/DistilBERT", "library/torch/limit/DistilBERT"]
    for key, lines in cases.items():
        assert [line["name"] for line in lines] == [
            "plain",
            "plain again",
            "remat, 60%",
            "remat, 40%",
            "remat, smallest",
        ]
        for line in lines[2:]:
            assert line["equal_bits"], (key, line)
            assert line["peak_bytes"] <= 1.01 * line["budget_bytes"], (key, line)
    assert "| DistilBERT limit | remat, 60% |" in (tmp_path / "gpu-here.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("model", ["resnet50", "gpt2", "llama"])
def test_budgets_and_peers_of_every_model(framework: str, model: str, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--small", "--frameworks", framework, "--only", f"{model}/float32", "--parts")
    run(tmp_path, *options, "budgets,peers")
    cases = results(tmp_path)["cases"]
    assert len(cases) == (2 if framework == "jax" else 6)
    for key, lines in cases.items():
        assert not any(line["name"] == "stopped" for line in lines), (key, lines)
        ours = [line for line in lines if line["name"].startswith("remat") and "error" not in line]
        assert ours, (key, lines)
        for line in ours:
            assert line["difference"] <= (0.0 if "/eager/" in key else 1e-4), (key, line)
            assert line["predicted_bytes"] <= line["budget_bytes"], (key, line)


@pytest.mark.slow
def test_exact_numbers_are_compared_side_by_side(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--small", "--parts", "exact", "--jobs", "2", "--only", "gpt2/float32")
    run(tmp_path, *options)
    cases = results(tmp_path)["cases"]
    assert sorted(cases) == [
        "exact/jax/jit/gpt2/float32",
        "exact/torch/eager/gpt2/float32",
        "exact/torch/graph/gpt2/float32",
    ]
    for key, lines in cases.items():
        ours = [line for line in lines if line["name"].startswith("remat") and "error" not in line]
        assert ours, (key, lines)
        assert all(line["equal_bits"] for line in ours if "/torch/" in key), (key, ours)
        assert not any("step_s" in line for line in lines)


@pytest.mark.slow
def test_whole_training_steps(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--small", "--parts", "training", "--frameworks", "torch", "--only", "gpt2")
    run(tmp_path, *options)
    cases = results(tmp_path)["cases"]
    assert sorted(cases) == ["training/torch/graph/gpt2/bfloat16", "training/torch/graph/gpt2/float16"]
    for key, lines in cases.items():
        ours = [line for line in lines[1:] if "error" not in line]
        assert ours, (key, lines)
        for line in ours:
            assert line["equal_bits"], (key, line)
            assert line["peak_bytes"] <= 1.01 * line["budget_bytes"], (key, line)


@pytest.mark.slow
def test_what_is_said_of_a_gpu_elsewhere(tmp_path: Path) -> None:
    run(tmp_path, "--device", "cpu", "--small", "--frameworks", "torch", "--parts", "laptop")
    lines = results(tmp_path)["cases"]["laptop/torch/eager"]
    assert len(lines) == 6
    assert all(line["elsewhere_bytes"] > 0 for line in lines)
    assert "| gpt2 float32 |" in (tmp_path / "gpu-here.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_host_and_calibration(framework: str, tmp_path: Path) -> None:
    run(tmp_path, "--device", "cpu", "--small", "--frameworks", framework, "--parts", "host,calibration")
    speeds = results(tmp_path)["cases"][f"calibration/{framework}"]
    assert speeds[0]["bytes_per_s"] > 1e8
    assert all(line["predicted_step_s"] > 0 for line in speeds[1:])
    assert len(speeds) == 7
