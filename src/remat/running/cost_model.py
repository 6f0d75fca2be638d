"""Seconds per operation from a roofline: an op is bound by arithmetic or by memory traffic, whichever takes longer.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009, doi:10.1145/1498765.1498785.

Named profiles hold public datasheet figures and an efficiency that well-tuned kernels reach. A plan depends on the
ratios between ops only, so a profile of the right kind of device is enough; ``calibrate`` makes one from timings.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from remat.core.errors import InvalidFile
from remat.core.files import JsonReader, read_json, write_json

MEASURED: Final = "measured"
"""The name of the profile that ``remat measure`` made on this machine."""

DEVICE_VARIABLE: Final = "REMAT_DEVICE"
"""The environment variable that names the profile of the device a step is planned for."""

_FORMAT: Final = "remat.device_profile"
_VERSION: Final = 1
_FALLBACK_DTYPE: Final = "float32"

_FRESH_BYTES_PER_S: Final = 2.5e9
"""Fresh pages that a process gets in a second: 1.6 us for one of 4 KiB. Measured in a virtual machine on an AMD EPYC of
2024; another took 2.9 us. Too low, steps that fetch memory anew are predicted too slow, which flatters plans that fetch
less."""

_TIMES_AS_FAST_IN_CACHES: Final = 2.5
"""How much faster ops read and write bytes in caches. Sums of vectors in TensorFlow on the same machine: 94 GB/s where
both and the result come to 12 MiB, 34 to 45 where they fit into no cache. Too high, plans that hold less in memory, so
that more of a step is in caches, are predicted too fast."""

_MOST_ROUNDS: Final = 20
"""Rounds of fitting after which ``calibrate`` stops although something still changes; it may swing between two fits. A
judgement: each round costs microseconds."""

_LAUNCH_BOUND: Final = 3.0
"""An op that takes this many times what its roofline says was waiting for its launch, not working. A judgement: well
above the factor of 2 by which a busy kernel may miss its roofline. Too small, slow kernels pass for launches; too
large, the launch time is fitted as 0."""


@dataclass(frozen=True)
class DeviceProfile:
    """What a device can do.

    Attributes:
        name: for people.
        flops_per_s: peak floating-point operations per second by dtype; a multiply-add counts as two. It holds at
            least ``"float32"``, which stands in for dtypes that are not listed.
        bytes_per_s: peak memory bandwidth.
        overhead_s: launch time of each op.
        compute_efficiency: the part of ``flops_per_s`` that dense kernels reach.
        bandwidth_efficiency: the part of ``bytes_per_s`` that streaming kernels reach.
        memory_bytes: what the device holds, None where unknown.
        compute_capability: of an NVIDIA GPU, such as (9, 0); None for every other device. It decides which kernels run.
        fresh_bytes_per_s: of a CPU, how fast a process gets pages that it has not had; see ``fresh_memory``. None where
            it was not measured, and for other devices, whose frameworks keep their memory.
        cached_bytes_per_s: of a CPU, the bandwidth of ops whose bytes are in its caches; None likewise.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    overhead_s: float = 0.0
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    fresh_bytes_per_s: float | None = None
    cached_bytes_per_s: float | None = None

    @property
    def is_cpu(self) -> bool:
        """Is it a CPU's, as far as the figures tell?"""
        return self.compute_capability is None

    @property
    def fresh_rate(self) -> float:
        """Bytes of fresh pages in a second, by the usual figure where none was measured."""
        return self.fresh_bytes_per_s or _FRESH_BYTES_PER_S

    @property
    def memory_rate(self) -> float:
        """Bytes in a second that streaming kernels read and write in main memory."""
        return self.bytes_per_s * self.bandwidth_efficiency

    @property
    def cached_rate(self) -> float:
        """Bytes in a second that they read and write in caches, by the usual ratio where none was measured."""
        return self.cached_bytes_per_s or _TIMES_AS_FAST_IN_CACHES * self.memory_rate

    def __post_init__(self) -> None:
        if _FALLBACK_DTYPE not in self.flops_per_s:
            raise ValueError(
                f"device profile {self.name!r} has no flops_per_s for {_FALLBACK_DTYPE!r}, only for "
                f"{', '.join(sorted(self.flops_per_s)) or 'nothing'}; it stands in for every dtype that is not listed"
            )
        rates = [*self.flops_per_s.values(), self.bytes_per_s, self.compute_efficiency, self.bandwidth_efficiency]
        rates += [rate for rate in (self.fresh_bytes_per_s, self.cached_bytes_per_s) if rate is not None]
        if not all(rate > 0 for rate in rates) or not self.overhead_s >= 0:
            raise ValueError(f"every rate of a device profile is above 0 and its overhead_s is 0 or more: {self}")
        object.__setattr__(self, "flops_per_s", MappingProxyType(dict(self.flops_per_s)))


@dataclass(frozen=True)
class OpSample:
    """One timed operation, for ``calibrate``.

    Attributes:
        flops: floating-point operations.
        bytes_moved: bytes read and written.
        dtype: of the arithmetic, "float32".
        time_s: measured seconds.
    """

    flops: float
    bytes_moved: float
    dtype: str
    time_s: float


def _gpu(
    name: str, flops_per_s: Mapping[str, float], bytes_per_s: float, memory_gib: int, capability: tuple[int, int]
) -> DeviceProfile:
    # Estimates, not measured here: a kernel starts about 3 us after the one before; large matrix products reach some
    # 60 % of the dense peak, and kernels that stream memory some 80 % of the bandwidth.
    return DeviceProfile(
        name,
        flops_per_s,
        bytes_per_s,
        3e-6,
        compute_efficiency=0.6,
        bandwidth_efficiency=0.8,
        memory_bytes=memory_gib * 2**30,
        compute_capability=capability,
    )


# float32 stands at the TF32 rate on these GPUs: the frameworks use it for convolutions and, TensorFlow and JAX, for
# matrix products; element-wise float32 ops are bound by memory anyhow. All rates are dense, without sparsity.
_HOPPER_FLOPS_PER_S: Final = {"float64": 67e12, "float32": 494.7e12, "bfloat16": 989.4e12, "float16": 989.4e12}

_PROFILES: Final[dict[str, DeviceProfile]] = {
    profile.name: profile
    for profile in (
        # No vendor's figure: 4 cores at 3 GHz with two 256-bit FMA units (32 float32 operations per cycle), and two
        # channels of DDR4-3200. Half precision is converted to float32 on load. Dispatch of an op takes about 5 us.
        DeviceProfile(
            "cpu",
            {"float64": 192e9, "float32": 384e9, "bfloat16": 384e9, "float16": 384e9},
            51.2e9,
            5e-6,
            compute_efficiency=0.6,
            bandwidth_efficiency=0.7,
        ),
        # NVIDIA A100 80GB SXM datasheet: FP64 tensor 19.5, TF32 156, BF16 and FP16 312 TFLOPS; 2,039 GB/s.
        _gpu(
            "a100", {"float64": 19.5e12, "float32": 156e12, "bfloat16": 312e12, "float16": 312e12}, 2039e9, 80, (8, 0)
        ),
        # NVIDIA H100 SXM datasheet: FP64 tensor 67, TF32 989 and BF16/FP16 1,979 TFLOPS with sparsity, dense half of
        # that; 3.35 TB/s.
        _gpu("h100", _HOPPER_FLOPS_PER_S, 3.35e12, 80, (9, 0)),
        # NVIDIA H200 SXM datasheet: arithmetic of the H100, 4.8 TB/s. Its driver shows 140 GiB of the 141 GB.
        _gpu("h200", _HOPPER_FLOPS_PER_S, 4.8e12, 140, (9, 0)),
    )
}


def profile_names() -> tuple[str, ...]:
    """The names that ``get_profile`` knows."""
    return (*_PROFILES, MEASURED)


def get_profile(name: str) -> DeviceProfile:
    """A profile by name; case does not matter.

    Raises:
        ValueError: if there is none; the message lists the names.
        FileNotFoundError: for ``"measured"`` where none was saved on this machine; the message says how to make it.
        InvalidFile: for ``"measured"`` where the stored file is damaged or from a newer version.
    """
    if name.lower() == MEASURED:
        return load_measured()
    try:
        return _PROFILES[name.lower()]
    except KeyError:
        raise ValueError(f"there is no device profile {name!r}; choose one of {', '.join(profile_names())}") from None


def device_here(usual: str) -> str:
    """Name of the profile for a step that is planned where it runs: what ``REMAT_DEVICE`` says, else the usual one."""
    return os.environ.get(DEVICE_VARIABLE) or usual


def op_time_s(profile: DeviceProfile, flops: float, bytes_moved: float, dtype: str = _FALLBACK_DTYPE) -> float:
    """Predicted seconds of one op.

    Args:
        profile: the device.
        flops: floating-point operations, a multiply-add counts as two.
        bytes_moved: bytes read and written.
        dtype: of the arithmetic; one that the profile does not list runs at the float32 rate.

    Returns:
        The launch time and the longer of arithmetic and traffic; 0.0 where there is neither (a view).
    """
    work_s = _roofline_s(profile, flops, bytes_moved, dtype)
    return profile.overhead_s + work_s if work_s > 0 else 0.0


def _roofline_s(profile: DeviceProfile, flops: float, bytes_moved: float, dtype: str) -> float:
    return max(_arithmetic_s(profile, flops, dtype), bytes_moved / (profile.bytes_per_s * profile.bandwidth_efficiency))


def _arithmetic_s(profile: DeviceProfile, flops: float, dtype: str) -> float:
    rate = profile.flops_per_s.get(dtype, profile.flops_per_s[_FALLBACK_DTYPE])
    return flops / (rate * profile.compute_efficiency)


def calibrate(samples: Sequence[OpSample], name: str = MEASURED, memory_bytes: int | None = None) -> DeviceProfile:
    """Fit a profile to timed ops.

    The rates start as the medians over the samples of highest and lowest arithmetic intensity. Then, in turn, each
    sample is put down to what bounds it under the current rates, and each rate becomes the median of what its samples
    achieved, until nothing changes. Medians keep a few disturbed timings from mattering. The overhead is the time of
    the op with the shortest roofline, if that explains less than a third of it; otherwise 0.

    Args:
        samples: ops of several sizes. Matrix products and large element-wise ops, some tiny ones for the overhead.
        name: of the profile.
        memory_bytes: what the device holds, None where unknown.

    Raises:
        ValueError: if there is no sample with arithmetic, or none with traffic, or a sample without time.
    """
    if any(not sample.time_s > 0 for sample in samples):
        raise ValueError("a sample took no time; repeat each op until it takes a measurable time and divide")
    if not any(sample.bytes_moved > 0 for sample in samples) or not any(sample.flops > 0 for sample in samples):
        raise ValueError(
            f"{len(samples)} samples do not determine a profile: at least one op with flops (a matrix product) and one "
            "that moves bytes (a large addition) are needed"
        )
    profile = _first_guess(samples, name)
    for _ in range(_MOST_ROUNDS):
        better = _refit(samples, profile)
        if better == profile:
            break
        profile = better
    return replace(profile, memory_bytes=memory_bytes)


def _first_guess(samples: Sequence[OpSample], name: str) -> DeviceProfile:
    by_dtype: dict[str, list[OpSample]] = {}
    for sample in samples:
        if sample.flops > 0:
            by_dtype.setdefault(sample.dtype, []).append(sample)
    rates = {
        dtype: statistics.median(s.flops / s.time_s for s in _third(of_dtype, highest=True))
        for dtype, of_dtype in by_dtype.items()
    }
    moving = [sample for sample in samples if sample.bytes_moved > 0]
    bandwidth = statistics.median(s.bytes_moved / s.time_s for s in _third(moving, highest=False))
    return DeviceProfile(name, _with_fallback(rates), bandwidth)


def _third(samples: list[OpSample], *, highest: bool) -> list[OpSample]:
    """The third with the highest or lowest arithmetic intensity, at least one."""
    ordered = sorted(samples, key=lambda s: s.flops / max(s.bytes_moved, 1.0), reverse=highest)
    return ordered[: max(1, len(ordered) // 3)]


def _with_fallback(rates: Mapping[str, float]) -> dict[str, float]:
    return {_FALLBACK_DTYPE: statistics.median(rates.values()), **rates}


def _refit(samples: Sequence[OpSample], profile: DeviceProfile) -> DeviceProfile:
    explained_s, time_s = min(
        (_roofline_s(profile, sample.flops, sample.bytes_moved, sample.dtype), sample.time_s) for sample in samples
    )
    overhead_s = time_s if time_s > _LAUNCH_BOUND * explained_s else 0.0

    flop_rates: dict[str, list[float]] = {}
    byte_rates: list[float] = []
    for sample in samples:
        work_s = sample.time_s - overhead_s
        if work_s < overhead_s:
            continue  # Mostly launch: it says nothing about the rates.
        arithmetic_s = _arithmetic_s(profile, sample.flops, sample.dtype)
        if arithmetic_s >= sample.bytes_moved / profile.bytes_per_s:
            flop_rates.setdefault(sample.dtype, []).append(sample.flops / work_s)
        else:
            byte_rates.append(sample.bytes_moved / work_s)
    rates = {dtype: statistics.median(found) for dtype, found in flop_rates.items()}
    # A rate that no sample is bound by any more keeps its last value.
    return DeviceProfile(
        profile.name,
        {**profile.flops_per_s, **rates},
        statistics.median(byte_rates) if byte_rates else profile.bytes_per_s,
        overhead_s,
    )


def measured_path() -> Path:
    """Where the measured profile of this machine is kept: in the user's cache folder."""
    # Only this profile needs it, and a plan from a graph file should start without it.
    from platformdirs import user_cache_path

    return user_cache_path("remat", appauthor=False) / f"device_profile_v{_VERSION}.json"


def save_measured(profile: DeviceProfile, path: str | Path | None = None) -> Path:
    """Keep a calibrated profile, so that ``get_profile("measured")`` finds it; returns the file written."""
    target = measured_path() if path is None else Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        target,
        {
            "format": _FORMAT,
            "version": _VERSION,
            "name": profile.name,
            "flops_per_s": dict(profile.flops_per_s),
            "bytes_per_s": profile.bytes_per_s,
            "overhead_s": profile.overhead_s,
            "compute_efficiency": profile.compute_efficiency,
            "bandwidth_efficiency": profile.bandwidth_efficiency,
            "memory_bytes": profile.memory_bytes,
            "fresh_bytes_per_s": profile.fresh_bytes_per_s,
            "cached_bytes_per_s": profile.cached_bytes_per_s,
        },
    )
    return target


def load_measured(path: str | Path | None = None) -> DeviceProfile:
    """Read a profile that ``save_measured`` wrote.

    Raises:
        FileNotFoundError: if there is none; the message says how to make it.
        InvalidFile: if the file is damaged or from a newer version.
    """
    source = measured_path() if path is None else Path(path)
    try:
        data = read_json(source)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no measured device profile at {source}; `remat measure SOURCE` makes one, and so does "
            "remat.running.cost_model.save_measured(remat.running.cost_model.calibrate(samples)), or choose one of "
            f"{', '.join(_PROFILES)}"
        ) from None
    reader = JsonReader(str(source), data)
    reader.check_format(_FORMAT, _VERSION)
    name, flops_per_s = reader.text("name"), reader.numbers_by_name("flops_per_s")
    bytes_per_s, overhead_s = reader.number("bytes_per_s"), reader.number("overhead_s")
    efficiencies = reader.number("compute_efficiency"), reader.number("bandwidth_efficiency")
    memory_bytes = reader.integer("memory_bytes") if reader.has("memory_bytes") else None
    of_memory: dict[str, Any] = {
        key: reader.number(key) for key in ("fresh_bytes_per_s", "cached_bytes_per_s") if reader.has(key)
    }
    try:
        return DeviceProfile(
            name,
            flops_per_s,
            bytes_per_s,
            overhead_s,
            *efficiencies,
            memory_bytes,
            **of_memory,
        )
    except ValueError as error:
        raise InvalidFile(f"{source}: {error}") from None
