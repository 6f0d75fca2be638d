"""``remat plan``, ``measure`` and ``check`` on callables of each framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from worker_process import worker

STEPS = """
def jax_step(batch_size=64):
    import jax, jax.numpy as jnp
    params = {"dense": [jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(6)]}

    def loss(params, x):
        for w in params["dense"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, params, jax.ShapeDtypeStruct((batch_size, 64), jnp.float32)


def fixed_batch():
    return jax_step()


def no_scalar():
    import jax.numpy as jnp
    return (lambda p: p * 2), jnp.ones(3)


def two_frameworks():
    import jax.numpy as jnp, tensorflow as tf
    return (lambda p, q: p), jnp.ones(3), tf.ones(3)


def needs(width, depth=2):
    return None


def none():
    return None


def broken():
    raise OSError("the weights are gone")


def tensorflow_step(batch_size=64):
    import tensorflow as tf
    ws = [tf.Variable(tf.random.stateless_normal((64, 64), (1, i)) * 0.1) for i in range(6)]

    def loss(x):
        for w in ws:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x**2)

    return loss, tf.TensorSpec((batch_size, 64), tf.float32)


def torch_step(batch_size=64):
    import torch
    model = torch_module()

    def loss(x):
        return model(x).square().mean()

    return loss, torch.zeros(batch_size, 64)


def in_one_tuple(framework):
    loss, *arguments = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}[framework]()
    if framework == "tensorflow":
        # TensorFlow takes a tuple of tensors for one tensor wherever it can.
        return (lambda x: loss(x[:, :])), tuple(arguments)
    return loss, tuple(arguments)


def attention():
    import torch
    x = torch.zeros(2, 4, 64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x).mean()), x


def torch_module():
    import torch
    return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)])


def keras_model(width=16):
    import keras
    layers = [keras.Input((24, 24, 3))]
    for _ in range(4):
        layers += [keras.layers.Conv2D(width, 3, padding="same"), keras.layers.BatchNormalization()]
        layers += [keras.layers.ReLU()]
    layers += [keras.layers.Dropout(0.3, seed=1), keras.layers.GlobalAveragePooling2D()]
    return keras.Sequential([*layers, keras.layers.Dense(10, "softmax")])


def subclassed():
    import keras

    class Dense(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Dense(64, "relu"), keras.layers.Dense(4)

        def call(self, x):
            return self.two(self.one(x))

    return Dense()
"""


WORKER = Path(__file__).with_name("cli_worker.py")


@pytest.fixture(scope="session")
def steps_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    (folder / "my_steps.py").write_text(STEPS)
    return folder


@pytest.fixture
def remat_cli(tmp_path, steps_folder):
    """Run a command in a process of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("REMAT_TRACEBACK", None)

    def run(*args: object, code: int = 0, **more: str) -> Done:
        command = [sys.executable, "-m", "remat.cli", *map(str, args)]
        done = subprocess.run(
            command, cwd=steps_folder, capture_output=True, text=True, timeout=600, env={**environment, **more}
        )
        assert done.returncode == code, done.stdout + done.stderr
        return Done(done.stdout, done.stderr)

    return run


@pytest.fixture
def in_shared_process(steps_folder):
    """Run a command in the one process that all commands of a framework share: each import of it takes seconds."""

    def run(framework: str, *args: object, code: int = 0) -> Done:
        process = worker(WORKER, FRAMEWORK_OF_COMMANDS=framework)
        answer = process.ask("run", str(steps_folder), *map(str, args))
        assert answer["code"] == code, answer["stdout"] + answer["stderr"]
        return Done(answer["stdout"], answer["stderr"])

    return run


class Done(NamedTuple):
    """What a command wrote."""

    stdout: str
    stderr: str


def mistake(run, *args: object) -> str:
    done = run(*args, code=2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_jax_step_is_planned_with_its_layers_lines_and_largest_batch(in_shared_process):
    options = ("--batch-size", 1024, "--budget", "1600kB", "--max-batch", "--planner", "peak_greedy", "--json")
    done = in_shared_process("jax", "plan", "my_steps:jax_step", *options)

    printed = json.loads(done.stdout)
    assert printed["peak_bytes"] <= printed["budget_bytes"] == 1_600_000
    plain = printed["breakdown"]["plain"]
    assert plain["parameters"] == 6 * 64 * 64 * 4
    assert plain["inputs"] == 1024 * 64 * 4
    assert sum(plain.values()) == printed["baseline_peak_bytes"]
    largest = printed["largest_at_peak"]
    assert len(largest) == 10
    assert {(one["layer"], one["source"]) for one in largest if one["op"] is not None} >= {
        ("loss", f"my_steps.py:{STEPS.splitlines().index('            x = jnp.tanh(x @ w)') + 1} in loss")
    }
    batches = printed["max_batch"]
    assert 0 < batches["plain"]["batch_size"] < batches["planned"]["batch_size"]
    assert batches["planned"]["peak_bytes"] <= 1_600_000


def test_torch_step_is_planned_with_its_layers_and_lines(in_shared_process):
    options = ("--batch-size", 1024, "--budget", "60%", "--planner", "peak_greedy", "--json")
    done = in_shared_process("torch", "plan", "my_steps:torch_step", *options)

    printed = json.loads(done.stdout)
    assert (
        printed["peak_bytes"] <= printed["budget_bytes"] == pytest.approx(0.6 * printed["baseline_peak_bytes"], abs=1)
    )
    assert printed["breakdown"]["plain"]["parameters"] == 6 * (64 * 64 + 64) * 4
    labels = {(one["layer"], one["source"]) for one in printed["largest_at_peak"] if one["op"] is not None}
    line = f"my_steps.py:{STEPS.splitlines().index('        return model(x).square().mean()') + 1} in loss"
    assert {source for _, source in labels} == {line}
    assert {layer for layer, _ in labels} & {"0.1", "1.0", "1.1"}


@pytest.mark.slow
def test_torch_module_is_planned_and_checked(remat_cli):
    arguments = ("my_steps:torch_module", "--input", 64, "--batch-size", 2048, "--optimizer", "Adam")
    printed = json.loads(remat_cli("plan", *arguments, "--budget", "70%", "--json").stdout)
    assert printed["peak_bytes"] <= printed["budget_bytes"]
    assert {one["source"] for one in printed["largest_at_peak"]} == {""}, "no line of the model's own calls a layer"
    for mode in ("graph", "eager"):
        done = remat_cli("check", *arguments, "--budget", "70%", "--mode", mode)
        assert "my_steps:torch_module: equal: " in done.stdout
    # Without --mode as under limit_memory, which is graph mode where it can be had.
    printed = json.loads(remat_cli("measure", *arguments, "--budget", "70%", "--steps", 2, "--json").stdout)
    assert printed["planned"]["measured_peak_bytes"] <= 1.01 * printed["budget_bytes"]
    assert printed["mode"] == "graph"


def test_function_that_returns_no_loss(in_shared_process):
    assert "returns float32[3], no loss" in mistake(in_shared_process, "jax", "plan", "my_steps:no_scalar")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("none", "this returned None, no training step"),
        ("needs", """calling it needs width; give it as --kwargs '{"width": "..."}'"""),
        ("broken", "raised OSError: the weights are gone"),
    ],
)
def test_callables_that_are_no_step(fails, tmp_path, monkeypatch, source, says):
    (tmp_path / "no_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "no_steps", raising=False)

    assert says in fails("plan", f"no_steps:{source}")


@pytest.mark.parametrize(
    ("framework", "arguments"),
    [
        ("torch", "(loss, batch) in place of (loss, (batch,))"),
        ("jax", "(loss, a, b) in place of (loss, (a, b))"),
        ("tensorflow", "(loss, batch) in place of (loss, (batch,))"),
    ],
)
def test_arguments_in_one_tuple_get_a_line_that_says_what_to_write(in_shared_process, framework, arguments):
    given = json.dumps({"framework": framework})
    said = mistake(in_shared_process, framework, "plan", "my_steps:in_one_tuple", "--kwargs", given)
    assert said.endswith(f"; return {arguments}, unless loss takes one tuple")


@pytest.mark.slow
def test_arguments_in_one_tuple_are_said_where_nothing_is_traced(in_shared_process):
    given = ("--no-calibrate", "--kwargs", json.dumps({"framework": "torch"}))
    said = mistake(in_shared_process, "torch", "measure", "my_steps:in_one_tuple", *given)
    assert said.endswith("; return (loss, batch) in place of (loss, (batch,)), unless loss takes one tuple")


def test_a_plan_for_a_gpu_says_what_it_assumed(in_shared_process):
    arguments = ("--budget", "120%", "--device", "h100")
    printed = json.loads(in_shared_process("torch", "plan", "my_steps:attention", *arguments, "--json").stdout)
    assert "runs on the GPU h100: cuDNN's attention 1 times" in printed["assumed"][0]
    shown = " ".join(in_shared_process("torch", "plan", "my_steps:attention", *arguments).stdout.split())
    assert f"Assumed: {printed['assumed'][0]}." in shown
    printed = json.loads(in_shared_process("jax", "plan", "my_steps:jax_step", *arguments, "--json").stdout)
    assert "the workspaces of cuDNN and cuBLAS there, are not known" in printed["assumed"][0]
    printed = json.loads(in_shared_process("jax", "plan", "my_steps:jax_step", "--budget", "120%", "--json").stdout)
    assert printed["assumed"] == []


@pytest.mark.slow
def test_arguments_of_two_frameworks(remat_cli):
    assert "belong to jax and tensorflow" in mistake(remat_cli, "plan", "my_steps:two_frameworks")


@pytest.mark.slow
def test_options_that_have_nowhere_to_go(in_shared_process):
    fixed = ("jax", "plan", "my_steps:fixed_batch", "--batch-size", 8)
    assert "let it take batch_size" in mistake(in_shared_process, *fixed)
    with_optimizer = ("jax", "plan", "my_steps:jax_step", "--optimizer", "adam")
    assert "--optimizer does not go with a JAX function" in mistake(in_shared_process, *with_optimizer)
    with_mode = ("jax", "plan", "my_steps:jax_step", "--mode")
    assert "--mode is for PyTorch, and this is a step of jax" in mistake(in_shared_process, *with_mode, "graph")
    assert "--mode lazy is unknown" in mistake(in_shared_process, *with_mode, "lazy")


@pytest.mark.slow
def test_tensorflow_step(in_shared_process):
    options = ("--batch-size", 4096, "--planner", "peak_greedy", "--json")
    printed = json.loads(in_shared_process("tensorflow", "plan", "my_steps:tensorflow_step", *options).stdout)

    assert printed["recomputed"] > 0
    assert printed["breakdown"]["plain"]["parameters"] == 6 * 64 * 64 * 4
    line = STEPS.splitlines().index("            x = tf.tanh(x @ w)") + 1
    assert any(one["source"] == f"my_steps.py:{line} in loss" for one in printed["largest_at_peak"])


@pytest.mark.slow
def test_subclassed_keras_model_needs_its_shape(in_shared_process):
    line = mistake(in_shared_process, "tensorflow", "plan", "my_steps:subclassed")
    assert "--input" in line

    options = ("--input", 28, "--batch-size", 500, "--budget", "100%", "--json")
    done = in_shared_process("tensorflow", "plan", "my_steps:subclassed", *options)
    assert json.loads(done.stdout)["breakdown"]["plain"]["optimizer_state"] > 2 * 28 * 64 * 4


@pytest.mark.slow
def test_keras_model_fits_a_device_or_not(in_shared_process):
    arguments = ("tensorflow", "plan", "my_steps:keras_model", "--device", "a100", "--json")

    small = json.loads(in_shared_process(*arguments).stdout)
    assert small["fits"]["memory_bytes"] == 80 * 2**30
    assert small["fits"]["plain"] is True
    large = json.loads(in_shared_process(*arguments, "--batch-size", 220_000, "--budget", "70GiB").stdout)
    assert (large["fits"]["plain"], large["fits"]["planned"]) == (False, True)
    assert large["max_batch"] is None


@pytest.mark.slow
def test_resnet152_is_planned_within_40_percent(in_shared_process):
    options = ("--batch-size", 64, "--budget", "40%", "--json")
    done = in_shared_process("tensorflow", "plan", "keras.applications:ResNet152", *options)

    printed = json.loads(done.stdout)
    assert printed["peak_bytes"] <= 0.4 * printed["baseline_peak_bytes"]
    assert printed["overhead"] < 0.25
    assert all(one["layer"] for one in printed["largest_at_peak"] if one["category"] == "activations")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_measure_shows_both_peaks_and_keeps_the_speed_of_the_machine(remat_cli, tmp_path, backend):
    done = remat_cli(
        "measure", "my_steps:keras_model", "--batch-size", 128, "--budget", "70%", "--json", KERAS_BACKEND=backend
    )

    printed = json.loads(done.stdout)
    assert printed["planned"]["measured_peak_bytes"] <= printed["budget_bytes"]
    assert printed["planned"]["measured_peak_bytes"] < 0.8 * printed["plain"]["measured_peak_bytes"]
    assert printed["planned"]["losses"] == pytest.approx(printed["plain"]["losses"], rel=1e-4)
    assert abs(printed["planned"]["predicted_peak_bytes"] / printed["planned"]["measured_peak_bytes"] - 1) < 0.2
    profile = json.loads((tmp_path / "cache" / "remat" / "device_profile_v1.json").read_text())
    assert (profile["format"], profile["version"]) == ("remat.device_profile", 1)
    assert 1e9 < profile["flops_per_s"]["float32"] < 1e15
    assert 1e8 < profile["bytes_per_s"] < 1e14
    planned = remat_cli("plan", "my_steps:jax_step", "--batch-size", 512, "--device", "measured", "--json")
    assert json.loads(planned.stdout)["baseline_time_s"] > 0


def test_measure_and_check_need_something_that_runs(fails, graph_file):
    for command in ("measure", "check"):
        assert f"`remat {command}` needs a model" in fails(command, graph_file)


@pytest.mark.slow
def test_failing_step_in_a_fresh_process_is_one_line(remat_cli):
    assert "raised OSError: the weights are gone" in mistake(remat_cli, "measure", "my_steps:broken", "--no-calibrate")


@pytest.mark.slow
def test_check_passes_on_a_model_with_statistics_and_dropout(remat_cli):
    done = remat_cli("check", "my_steps:keras_model", "--batch-size", 64, "--json")

    printed = json.loads(done.stdout)
    assert printed["passed"] is True
    assert printed["verdict"].startswith("equal: ")
    assert {one["what"] for one in printed["comparisons"]} == {
        "gradients",
        "weights",
        "optimizer state",
        "running statistics",
        "losses",
        "random states and counters",
    }
    assert printed["planned_peak_bytes"] <= printed["budget_bytes"] < printed["plain_peak_bytes"]


@pytest.mark.slow
def test_check_of_a_jax_function(remat_cli):
    done = remat_cli("check", "my_steps:jax_step", "--batch-size", 2048, "--budget", "75%")

    assert "my_steps:jax_step: equal: " in done.stdout
