"""``remat doctor``: with all frameworks, with one, with none, and with ones that are broken, too old or hang."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import remat
from remat.cli import doctor_command, probe_job
from remat.running import examination, machine, supported
from remat.running.examination import DeviceFacts, Probe
from remat.running.supported import FRAMEWORKS, JAX, PADDLE, TENSORFLOW, TORCH


@pytest.fixture
def installed(monkeypatch):
    """Say which frameworks are installed, in which version, and what their front ends answer."""

    def install(versions, probes=None):
        def version(package):
            if package not in versions:
                raise supported.importlib.metadata.PackageNotFoundError(package)
            return versions[package]

        asked = []

        def probe(framework):
            asked.append(framework.module)
            return (probes or {}).get(framework.module, Probe((DeviceFacts("cpu", "", 2**30, "a counter"),)))

        monkeypatch.setattr(supported.importlib.metadata, "version", version)
        monkeypatch.setattr(doctor_command, "probe_in_a_process", probe)
        return asked

    for name in ("KERAS_BACKEND", "REMAT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERAS_HOME", "/nonexistent")
    monkeypatch.setattr(examination, "_has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(examination, "_compilers", lambda: examination.Compilers({"g++": "g++ 12"}, ""))
    monkeypatch.setattr(examination, "load_measured", lambda: remat.cost_model.get_profile("cpu"))
    return install


def problems(run) -> dict[str, str]:
    result = run("doctor", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return {one["what"]: one["remedy"] for one in json.loads(result.stdout)["problems"]}


@pytest.mark.slow  # It imports four frameworks.
def test_every_framework_of_this_environment_is_found_with_its_counters(run_script):
    result = run_script("doctor", "--json")

    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    frameworks = {one["name"]: one for one in found["frameworks"]}
    assert set(frameworks) == {one.name for one in FRAMEWORKS}
    assert all(one["in_range"] for one in frameworks.values())
    counters = {name: facts["devices"][0]["counter"] for name, facts in frameworks.items() if facts["devices"]}
    # The tests' environment turns TensorFlow's counter on.
    assert counters == {
        "TensorFlow": "tf.config.experimental.get_memory_info",
        "JAX": "memory_analysis",
        "PyTorch": "torch.profiler",
        "PaddlePaddle": "paddle's host memory statistics",
    }
    assert frameworks["TensorFlow"]["onednn"]
    assert all(facts["works"] for name, facts in frameworks.items() if name in counters)
    assert found["packages"]["python"] == sys.version.split()[0]
    assert found["system"]["cores"] >= 1


def test_no_framework(run, installed):
    asked = installed({})

    (what,) = problems(run)
    assert asked == []
    assert what == "No framework is installed: only graph files can be planned"


def test_one_framework_only(run, installed):
    asked = installed({"jax": "0.10.2"})

    assert problems(run) == {}
    assert asked == ["jax"]
    screen = run("doctor").stdout
    assert "Everything works here." in screen
    assert "0.10.2 (supported: 0.8 to 0.12)" in screen
    assert "not installed (supported: 2.9 to 2.15)" in screen


def test_a_version_out_of_range(run, installed):
    installed({"torch": "2.8.0", "tf_keras": "2.18.0"}, {"torch": Probe(error="remat.torch supports ...")})

    found = problems(run)
    assert set(found) == {
        f"remat.torch supports PyTorch {TORCH.range}, and 2.8.0 is installed",
        "tf_keras 2.18.0 was not tried: remat supports 2.19 to 2.21",
    }
    assert all("pip install" in remedy for remedy in found.values())
    assert "2.8.0 (NOT SUPPORTED: 2.9 to 2.15); cannot be imported" in run("doctor").stdout


def test_a_broken_framework(run, installed):
    installed({"torch": "2.13.0", "jax": "0.10.2"}, {"torch": Probe(error="libgone.so: no such file")})

    assert list(problems(run)) == ["import remat.torch: libgone.so: no such file"]


def test_a_missing_counter(run, installed):
    device = DeviceFacts("CPU:0", "", 2**30, "")
    installed({"tensorflow-cpu": "2.21.0"}, {"tensorflow": Probe((device,), onednn=False)})

    ((what, remedy),) = problems(run).items()
    assert what == "Measuring real peaks of TensorFlow on CPU:0: no counter"
    assert "TF_ENABLE_ONEDNN_OPTS=1" in remedy
    assert "oneDNN off" in run("doctor").stdout


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (None, "Keras is set to the backend 'tensorflow', which is not installed"),
        ("jax", "Keras is set to the backend 'jax', which is not installed"),
        ("numpy", "Keras is set to the backend 'numpy', on which remat cannot train"),
        ("torch", None),
    ],
)
def test_the_backend_of_keras(run, installed, monkeypatch, backend, expected):
    installed({"keras": "3.15.0", "torch": "2.13.0"})
    if backend:
        monkeypatch.setenv("KERAS_BACKEND", backend)

    assert list(problems(run)) == ([expected] if expected else [])


def test_a_gpu_that_a_framework_does_not_see(run, installed, monkeypatch):
    gpu = DeviceFacts("cuda:0", "A GPU", 2**36, "a counter")
    installed({"torch": "2.13.0", "jax": "0.10.2"}, {"torch": Probe((gpu,))})
    monkeypatch.setattr(examination, "_has_nvidia_gpu", lambda: True)

    assert list(problems(run)) == ["JAX does not see the NVIDIA GPU of this machine"]


def test_what_the_environment_and_the_machine_lack(run, installed, monkeypatch):
    installed({"torch": "2.13.0"})
    monkeypatch.setenv("REMAT_DEVICE", "h1000")
    monkeypatch.setattr(examination, "_compilers", lambda: examination.Compilers({}, "there is no C++ compiler"))

    def none_yet():
        raise FileNotFoundError

    monkeypatch.setattr(examination, "load_measured", none_yet)

    assert list(problems(run)) == [
        "remat.torch.compile on a CPU: there is no C++ compiler",
        "REMAT_DEVICE=h1000 names no device profile",
        "--device measured: the speed of this machine was never measured",
    ]


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """Make ``import torch`` of other processes do something else."""

    def fake(source):
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(remat.__file__).parents[1]}")

    return fake


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import libgone", "No module named 'libgone'"),
        ("raise ImportError('undefined symbol: x')", "undefined symbol: x"),
        ("raise OSError('libgone.so: no such file')", "libgone.so: no such file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "SIGABRT"),
        ("__version__ = '1.13.1'", "remat.torch supports PyTorch 2.9 to 2.15, and 1.13.1 is installed"),
    ],
)
def test_a_framework_that_cannot_be_imported_is_told(fake_torch, source, expected):
    fake_torch(source)

    found = probe_job.probe_in_a_process(TORCH)
    assert found.devices == ()
    assert expected in found.error
    assert "\n" not in found.error


def test_a_framework_that_hangs_is_cut_off(fake_torch, monkeypatch):
    fake_torch("import threading; threading.Event().wait()")
    monkeypatch.setattr(probe_job, "_TIME_LIMIT_S", 0.01)

    assert probe_job.probe_in_a_process(TORCH).error == "importing remat.torch took more than 0.01 s and was stopped"


def test_a_front_end_is_asked_in_a_process_of_its_own():
    (device, *_) = probe_job.probe_in_a_process(JAX).devices

    assert (device.name, device.counter) == ("cpu:0", "memory_analysis")
    assert device.memory_bytes == machine.memory_bytes()


def test_every_front_end_has_a_probe():
    folder = Path(remat.__file__).parent
    assert all((folder / one.module / "probe.py").exists() for one in (JAX, PADDLE, TENSORFLOW, TORCH))


def test_a_compiler_that_cannot_compile_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "false")

    found = examination._compilers()
    assert found.inductor_error == "false cannot compile: it said nothing"
