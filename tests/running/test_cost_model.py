"""The roofline, the named profiles, and the profile measured on this machine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from remat import InvalidFile
from remat.running import cost_model
from remat.running.cost_model import (
    DeviceProfile,
    OpSample,
    calibrate,
    get_profile,
    load_measured,
    op_time_s,
    profile_names,
    save_measured,
)

SIMPLE = DeviceProfile("simple", {"float32": 100.0, "float16": 400.0}, 10.0, overhead_s=0.5)


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "dtype", "time_s"),
    [
        (200.0, 10.0, "float32", 2.5),  # arithmetic: 200 / 100
        (200.0, 40.0, "float32", 4.5),  # traffic: 40 / 10
        (400.0, 1.0, "float16", 1.5),  # 400 / 400
        (200.0, 10.0, "int32", 2.5),  # not listed: the float32 rate
        (0.0, 10.0, "float32", 1.5),
        (0.0, 0.0, "float32", 0.0),  # a view is free, launch included
    ],
)
def test_roofline(flops: float, bytes_moved: float, dtype: str, time_s: float) -> None:
    assert op_time_s(SIMPLE, flops, bytes_moved, dtype) == time_s


def test_efficiencies_scale_the_peaks() -> None:
    profile = DeviceProfile("p", {"float32": 100.0}, 10.0, compute_efficiency=0.5, bandwidth_efficiency=0.25)
    assert op_time_s(profile, 100.0, 0.0) == 2.0
    assert op_time_s(profile, 0.0, 10.0) == 4.0


@pytest.mark.parametrize(
    ("name", "dtype", "flops_per_s", "bytes_per_s"),
    [
        ("a100", "float16", 312e12, 2039e9),
        ("a100", "float32", 156e12, 2039e9),
        ("h100", "bfloat16", 989.4e12, 3.35e12),
        ("h200", "bfloat16", 989.4e12, 4.8e12),
        ("H200", "float64", 67e12, 4.8e12),
    ],
)
def test_datasheet_figures(name: str, dtype: str, flops_per_s: float, bytes_per_s: float) -> None:
    profile = get_profile(name)
    assert profile.flops_per_s[dtype] == flops_per_s
    assert profile.bytes_per_s == bytes_per_s


def test_named_profiles_order_as_their_devices() -> None:
    times = [op_time_s(get_profile(name), 2e12, 1e9, "float16") for name in ("cpu", "a100", "h100")]
    assert times == sorted(times, reverse=True)
    traffic = [op_time_s(get_profile(name), 0, 1e9) for name in ("cpu", "a100", "h100", "h200")]
    assert traffic == sorted(traffic, reverse=True)


def test_unknown_profile_lists_the_names() -> None:
    with pytest.raises(ValueError, match="no device profile 'v100'; choose one of cpu, a100, h100, h200, measured"):
        get_profile("v100")
    assert profile_names() == ("cpu", "a100", "h100", "h200", "measured")


def test_profiles_are_checked() -> None:
    with pytest.raises(ValueError, match=r"'p' has no flops_per_s for 'float32', only for float16"):
        DeviceProfile("p", {"float16": 1.0}, 1.0)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            DeviceProfile("p", {"float32": wrong}, 1.0)
        with pytest.raises(ValueError, match="above 0"):
            DeviceProfile("p", {"float32": 1.0}, wrong)
    with pytest.raises(ValueError, match="0 or more"):
        DeviceProfile("p", {"float32": 1.0}, 1.0, overhead_s=-1.0)


def test_profiles_are_frozen() -> None:
    rates = {"float32": 1.0}
    profile = DeviceProfile("p", rates, 1.0)
    rates["float32"] = 2.0
    assert profile.flops_per_s["float32"] == 1.0
    with pytest.raises(TypeError):
        profile.flops_per_s["float32"] = 3.0  # type: ignore[index]


TRUTH = DeviceProfile("truth", {"float32": 5e11, "float16": 2e12}, 4e10, overhead_s=4e-6)


def timed(rng: random.Random, noise: float, count: int = 60, overhead_s: float = TRUTH.overhead_s) -> list[OpSample]:
    """Samples of a device that follows the roofline exactly, times a factor from 1 to 1 + noise."""
    device = DeviceProfile("d", TRUTH.flops_per_s, TRUTH.bytes_per_s, overhead_s)
    samples = [OpSample(0.0, 64.0, "float32", op_time_s(device, 0.0, 64.0))]
    for _ in range(count):
        dtype = rng.choice(["float32", "float16"])
        flops, bytes_moved = rng.choice([(10 ** rng.uniform(9, 11), 1e6), (1e6, 10 ** rng.uniform(7, 9))])
        time_s = op_time_s(device, flops, bytes_moved, dtype) * (1 + noise * rng.random())
        samples.append(OpSample(flops, bytes_moved, dtype, time_s))
    return samples


def assert_close(found: DeviceProfile, tolerance: float) -> None:
    assert found.flops_per_s["float32"] == pytest.approx(TRUTH.flops_per_s["float32"], rel=tolerance)
    assert found.flops_per_s["float16"] == pytest.approx(TRUTH.flops_per_s["float16"], rel=tolerance)
    assert found.bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=tolerance)


@pytest.mark.parametrize("seed", range(5))
def test_calibration_finds_the_device(seed: int) -> None:
    found = calibrate(timed(random.Random(seed), noise=0.0))
    assert_close(found, 0.01)
    assert found.overhead_s == pytest.approx(TRUTH.overhead_s, rel=0.01)
    assert (found.name, found.compute_efficiency, found.bandwidth_efficiency) == ("measured", 1.0, 1.0)


def test_calibration_tells_launch_from_work() -> None:
    found = calibrate(timed(random.Random(1), noise=0.0, overhead_s=2e-3))
    assert found.overhead_s == pytest.approx(2e-3, rel=0.01)
    assert_close(found, 0.01)


@pytest.mark.parametrize("seed", range(5))
def test_calibration_withstands_noise_and_outliers(seed: int) -> None:
    rng = random.Random(seed)
    samples = timed(rng, noise=0.1)
    disturbed = [
        OpSample(s.flops, s.bytes_moved, s.dtype, s.time_s * (30 if number % 7 == 3 else 1))
        for number, s in enumerate(samples)
    ]
    assert_close(calibrate(disturbed), 0.15)


def test_calibration_without_small_ops_finds_no_overhead() -> None:
    samples = timed(random.Random(0), noise=0.0, overhead_s=0.0)[1:]
    assert calibrate(samples).overhead_s == 0.0
    assert_close(calibrate(samples), 0.01)


def test_calibration_gives_float32_a_rate_even_unseen() -> None:
    found = calibrate([OpSample(1e9, 1.0, "bfloat16", 1e-3), OpSample(1.0, 1e9, "bfloat16", 1e-1)])
    assert found.flops_per_s == {"float32": pytest.approx(1e12), "bfloat16": pytest.approx(1e12)}
    assert found.bytes_per_s == pytest.approx(1e10)


def test_calibration_needs_enough() -> None:
    with pytest.raises(ValueError, match="0 samples do not determine"):
        calibrate([])
    with pytest.raises(ValueError, match="1 samples do not determine"):
        calibrate([OpSample(0.0, 1e6, "float32", 1.0)])
    with pytest.raises(ValueError, match="took no time"):
        calibrate([OpSample(1.0, 1.0, "float32", 0.0)])


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "profile.json"
    monkeypatch.setattr(cost_model, "measured_path", lambda: path)
    return path


def test_measured_profile_is_kept(stored: Path) -> None:
    assert save_measured(TRUTH) == stored
    assert get_profile("measured") == TRUTH
    assert load_measured(stored) == TRUTH


def test_measured_profile_that_was_never_made(stored: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"calibrate\(samples\)\), or choose one of cpu, a100") as caught:
        get_profile("measured")
    assert str(stored) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "remat.graph"}, r"no remat\.device_profile file"),
        ({"version": 2}, "written by a newer remat"),
        ({"flops_per_s": [1]}, "'flops_per_s' of the file is .* not a JSON object"),
        ({"flops_per_s": {"float32": "fast"}}, "'float32' of 'flops_per_s' of the file is \"fast\", not a number"),
        ({"flops_per_s": {}}, "no flops_per_s for 'float32'"),
        ({"bytes_per_s": -1}, "above 0"),
    ],
)
def test_damaged_measured_profile(stored: Path, change: dict[str, object], message: str) -> None:
    save_measured(TRUTH)
    stored.write_text(json.dumps({**json.loads(stored.read_text()), **change}))
    with pytest.raises(InvalidFile, match=message) as caught:
        get_profile("measured")
    assert str(caught.value).startswith(f"{stored}: ")


def test_measured_profile_is_in_the_users_cache_folder() -> None:
    path = cost_model.measured_path()
    assert path.name == "device_profile_v1.json"
    assert "remat" in path.parts[-2]
