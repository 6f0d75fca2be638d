"""What ``remat doctor`` finds on a machine, and what follows from it; nothing here imports a framework.

``examine`` asks the system itself, and for each installed framework a ``Probe``. The caller supplies that: only the
framework can say which devices it sees and which of its counters work.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from remat.core.errors import InvalidFile
from remat.running import machine
from remat.running.cost_model import DEVICE_VARIABLE, MEASURED, load_measured, profile_names
from remat.running.supported import FRAMEWORKS, KERAS, TENSORFLOW, TF_KERAS, TORCH, Framework, refusal

# What instruction sets decide: TensorFlow's oneDNN is on by itself with the first three (see docs/troubleshooting.md),
# and half precision is emulated without the last three. Spelled as Linux does in /proc/cpuinfo.
_INSTRUCTIONS: Final = (
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "avx_vnni",
    "avx2",
    "avx512f",
    "f16c",
    "asimd",
    "bf16",
)

# The variables of the environment that change what remat or a framework does with memory.
_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "KERAS_BACKEND",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "REMAT_ANY_VERSION",
    "REMAT_DEVICE",
    "REMAT_PLAN_CACHE",
    "REMAT_RECOMPUTE",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)

_COMPILER_LIMIT_S: Final = 20.0  # A judgement: an empty program compiles in a tenth of a second.


@dataclass(frozen=True)
class DeviceFacts:
    """A device that a framework sees.

    Attributes:
        name: as the framework calls it: "CPU:0".
        description: the maker's name of it, "" where nobody says.
        memory_bytes: what it holds, None where unknown.
        counter: what shows the real peak of a step there, "" where nothing does. It was asked, not assumed.
    """

    name: str
    description: str
    memory_bytes: int | None
    counter: str


@dataclass(frozen=True)
class Probe:
    """What a front end's ``probe`` says when it is asked in a process of its own.

    Attributes:
        devices: those that the framework sees.
        onednn: does the framework use oneDNN on the CPU? None where it has no such choice.
        error: why the front end cannot be imported, "" where it can.
    """

    devices: tuple[DeviceFacts, ...] = ()
    onednn: bool | None = None
    error: str = ""


@dataclass(frozen=True)
class FrameworkFacts:
    """A framework on this machine.

    Attributes:
        name: for people.
        version: that is installed, None for none.
        supported: the range of versions, for people.
        in_range: is the installed version in it?
        front_end: the package of remat for it, "" for none of its own.
        works: can the front end be imported? None where it was not tried.
        error: why not.
        devices: those that it sees.
        onednn: as in ``Probe``.
        backend: of Keras: the framework that it runs on.
    """

    name: str
    version: str | None
    supported: str
    in_range: bool
    front_end: str
    works: bool | None = None
    error: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    onednn: bool | None = None
    backend: str = ""


@dataclass(frozen=True)
class Compilers:
    """The compilers at hand.

    Attributes:
        found: name -> the first line of its ``--version``.
        inductor_error: why ``torch.compile`` cannot compile for the CPU, "" where it can.
    """

    found: Mapping[str, str]
    inductor_error: str


@dataclass(frozen=True)
class Calibration:
    """The device profile that ``remat measure`` keeps.

    Attributes:
        found: is there one that can be read?
        name: of the profile.
        error: why it cannot be read.
    """

    found: bool
    name: str = ""
    error: str = ""


@dataclass(frozen=True)
class Problem:
    """Something that will not work on this machine, and what to do."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Examination:
    """Everything that ``remat doctor`` shows.

    Attributes:
        packages: versions of Python, of remat and of what it is made of.
        system: name and release, processor, cores, memory in bytes.
        instructions: sets of the processor that decide something; None where the system does not list them.
        has_nvidia_gpu: is a driver of NVIDIA loaded?
        environment: the variables that are set, of those that matter.
        frameworks: all that remat has a front end for, installed or not.
        calibration: see there.
        compilers: see there.
        problems: what will not work here.
    """

    packages: Mapping[str, str]
    system: Mapping[str, str | int | None]
    instructions: tuple[str, ...] | None
    has_nvidia_gpu: bool
    environment: Mapping[str, str]
    frameworks: tuple[FrameworkFacts, ...]
    calibration: Calibration
    compilers: Compilers
    problems: tuple[Problem, ...] = field(default=())


def examine(probe: Callable[[Framework], Probe]) -> Examination:
    """Look at this machine.

    Args:
        probe: asks the front end of an installed framework, in a process of its own. It raises nothing.
    """
    asked = [one for one in FRAMEWORKS if one not in (KERAS, TF_KERAS) and one.installed_version() is not None]
    # Most of a probe is waiting for the disk while a framework is imported.
    with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
        probes = dict(zip(asked, pool.map(probe, asked), strict=True))
    frameworks = tuple(_facts(one, probes.get(one)) for one in FRAMEWORKS)
    found = Examination(
        packages={name: version for name, version in machine.versions().items() if name in _OWN_PACKAGES},
        system={**machine.described(), "release": platform.platform(), "model": _processor_model()},
        instructions=_instructions(),
        has_nvidia_gpu=_has_nvidia_gpu(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        frameworks=frameworks,
        calibration=_calibration(),
        compilers=_compilers(),
    )
    return Examination(**{**vars(found), "problems": tuple(problems_of(found))})


_OWN_PACKAGES: Final = ("python", "remat", "numpy", "highspy")


def problems_of(found: Examination) -> list[Problem]:
    """What will not work on a machine, and what to do about each."""
    problems: list[Problem] = []
    by_name = {one.name: one for one in found.frameworks}
    if not any(one.version is not None and one.front_end for one in found.frameworks):
        problems.append(
            Problem(
                "No framework is installed: only graph files can be planned",
                "pip install 'remat[torch]', 'remat[jax]' or 'remat[tensorflow]'",
            )
        )
    for framework in FRAMEWORKS:
        problems += _problems_of_framework(framework, by_name[framework.name], found)
    if by_name[TORCH.name].version is not None and found.compilers.inductor_error:
        problems.append(
            Problem(
                f"remat.torch.compile on a CPU: {found.compilers.inductor_error}",
                "install a C++ compiler and Python's headers (Debian, Ubuntu: sudo apt install g++ python3-dev)",
            )
        )
    named = found.environment.get(DEVICE_VARIABLE)
    if named is not None and named.lower() not in profile_names():
        problems.append(
            Problem(
                f"{DEVICE_VARIABLE}={named} names no device profile", f"set it to one of {', '.join(profile_names())}"
            )
        )
    if not found.calibration.found:
        why = found.calibration.error or "the speed of this machine was never measured"
        problems.append(Problem(f"--device {MEASURED}: {why}", "run `remat measure SOURCE` once"))
    return problems


def _problems_of_framework(framework: Framework, facts: FrameworkFacts, found: Examination) -> list[Problem]:
    if facts.version is None:
        return []
    problems = []
    if not facts.in_range:
        if framework.imported_by:
            what, _, remedy = refusal(framework, facts.version).partition(": ")
        else:
            what = f"{framework.name} {facts.version} was not tried: remat supports {framework.range}"
            remedy = f"pip install '{framework.requirement}'"
        problems.append(Problem(what, remedy))
    elif facts.works is False:
        problems.append(
            Problem(
                f"import {facts.front_end}: {facts.error}",
                f"mend the installation: python -c 'import {framework.module}'",
            )
        )
    if framework is KERAS:
        backend = next((one for one in FRAMEWORKS if one.module == facts.backend), None)
        if backend is None:
            problems.append(
                Problem(
                    f"Keras is set to the backend {facts.backend!r}, on which remat cannot train",
                    "set KERAS_BACKEND=tensorflow, jax or torch",
                )
            )
        elif backend.installed_version() is None:
            problems.append(
                Problem(
                    f"Keras is set to the backend {facts.backend!r}, which is not installed",
                    f"pip install '{backend.requirement}', or set KERAS_BACKEND to a framework that is",
                )
            )
    for device in facts.devices:
        if not device.counter:
            remedy = "measure on another device"
            if framework is TENSORFLOW:
                remedy = (
                    "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported; planning and training need no counter"
                )
            problems.append(Problem(f"Measuring real peaks of {framework.name} on {device.name}: no counter", remedy))
    if found.has_nvidia_gpu and facts.works and facts.devices and not any(_is_gpu(one) for one in facts.devices):
        problems.append(
            Problem(
                f"{framework.name} does not see the NVIDIA GPU of this machine",
                f"install the build of {framework.name} for CUDA; look at CUDA_VISIBLE_DEVICES and JAX_PLATFORMS, too",
            )
        )
    return problems


def _is_gpu(device: DeviceFacts) -> bool:
    return device.name.lower().startswith(("gpu", "cuda"))


def _facts(framework: Framework, probe: Probe | None) -> FrameworkFacts:
    version = framework.installed_version()
    return FrameworkFacts(
        name=framework.name,
        version=version,
        supported=framework.range,
        in_range=version is not None and framework.has(version),
        front_end=framework.imported_by,
        works=None if probe is None else not probe.error,
        error="" if probe is None else probe.error,
        devices=() if probe is None else probe.devices,
        onednn=None if probe is None else probe.onednn,
        backend=_keras_backend() if framework is KERAS and version is not None else "",
    )


def _keras_backend() -> str:
    """The backend that Keras takes when it is imported: the environment's, else that of its settings."""
    if named := os.environ.get("KERAS_BACKEND"):
        return named
    home = Path(os.environ.get("KERAS_HOME", Path("~/.keras").expanduser()))
    try:
        settings = json.loads((home / "keras.json").read_text(encoding="utf-8"))
        return str(settings.get("backend", TENSORFLOW.module))
    except (OSError, ValueError, AttributeError):
        return TENSORFLOW.module


def _lines_of_cpuinfo() -> list[tuple[str, str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    pairs = (line.partition(":") for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _processor_model() -> str:
    return next((value for name, value in _lines_of_cpuinfo() if name == "model name"), platform.processor())


def _instructions() -> tuple[str, ...] | None:
    for name, value in _lines_of_cpuinfo():
        if name in ("flags", "Features"):
            flags = set(value.split())
            return tuple(one for one in _INSTRUCTIONS if one in flags)
    return None


def _has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _calibration() -> Calibration:
    try:
        return Calibration(True, load_measured().name)
    except FileNotFoundError:
        return Calibration(False)
    except (InvalidFile, OSError) as error:
        return Calibration(False, error=str(error))


def _compilers() -> Compilers:
    named = os.environ.get("CXX")
    found = {}
    for name in dict.fromkeys(("cc", "gcc", "clang", "g++", "clang++", *([named] if named else []))):
        if shutil.which(name) is not None:
            said = _run_compiler([name, "--version"], "")
            found[name] = said.stdout.partition("\n")[0] if said is not None else "does not answer"
    # Inductor's own choice is CXX, else g++, and clang++ on macOS.
    cxx = next((name for name in (named, "g++", "clang++") if name in found), None)
    if cxx is None:
        return Compilers(found, "there is no C++ compiler")
    include = sysconfig.get_path("include")
    done = _run_compiler(
        [cxx, "-fsyntax-only", "-x", "c++", f"-I{include}", "-"], "#include <cmath>\n#include <Python.h>\n"
    )
    if done is None:
        return Compilers(found, f"{cxx} does not answer")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        return Compilers(found, f"{cxx} cannot compile: {(errors or ['it said nothing'])[0].rpartition('error: ')[2]}")
    return Compilers(found, "")


def _run_compiler(command: list[str], program: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, input=program, capture_output=True, text=True, timeout=_COMPILER_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
