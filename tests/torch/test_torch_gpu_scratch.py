"""What is known of a GPU's scratch memory without one; ``make gpu`` measures the rest where there is one."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from remat.torch.graph_mode.timed_calls import TimedCalls
from remat.torch.trace import gpu_scratch, lone_calls
from remat.torch.trace.known_values import KnownValues
from remat.torch.trace.stand_ins import StandIns

aten = torch.ops.aten
KIB = 1024


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), 8320 * KIB), ((8, 0), 8320 * KIB), ((9, 0), 32 << 20), ((12, 0), 8320 * KIB)]
)
def test_cublas_keeps_a_workspace_for_each_of_two_threads(capability, expected):
    assert gpu_scratch.cublas_bytes([aten.relu.default, aten.mm.default], capability) == 2 * (expected + 1024 * KIB)


def test_without_products_cublas_keeps_nothing():
    assert gpu_scratch.cublas_bytes([aten.relu.default, aten.convolution.default, "output"], (9, 0)) == 0


def test_a_configuration_of_cublas_is_followed(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    assert gpu_scratch.cublas_bytes([aten.addmm.default], (9, 0)) == 2 * (2 * 4096 + 8 * 16) * KIB


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], 0),
        ([100], 0),  # A result.
        ([100, 40, -40], 40),
        ([100, 40, -40, 10, 60, -60], 60),  # The second of two kernels takes more.
        ([40, 100, -40], 40),
        ([500, -500, 100], 400),  # Gone before the result is there.
    ],
)
def test_scratch_is_what_is_given_back(changes, expected):
    assert lone_calls.scratch_in(changes) == expected


def test_a_step_without_a_gpu_keeps_no_workspace():
    assert gpu_scratch.capability_of("cpu") is None
    assert gpu_scratch.known_bytes(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}) == 0


def test_a_call_in_the_backward_pass_does_not_wait_for_it(monkeypatch):
    """On a GPU that pass has one thread, and what waits for it inside of it never ends."""
    waited = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_scratch, "_take_workspace_of_backward", waited.append)
    product = (aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: (gpu_scratch._seen(*product), None)[1])
    x.sum().backward()
    assert waited == []
    assert gpu_scratch._seen(*product) == 0  # On a CPU nothing is taken on a GPU.
    assert waited == [0]


def test_what_asserts_is_never_run_on_numbers_made_up_for_it(monkeypatch):
    """On a GPU a failed assertion ends every further call of the process."""
    assert lone_calls.may_run_alone(aten.mm.default)
    assert not lone_calls.may_run_alone(aten._assert_async.msg)

    def step(x):
        aten._assert_async.msg((x > 0).all(), "no")
        return x @ x

    joint = make_fx(step, tracing_mode="fake")(torch.ones(4, 4))
    made_up, made = lone_calls.made_up, []
    monkeypatch.setattr(lone_calls, "made_up", lambda func, *given: made.append(func) or made_up(func, *given))
    TimedCalls().of_step(joint, most_bytes=1 << 20)
    assert aten.mm.default in made
    assert aten._assert_async.msg not in made


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "backward",
    [
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._flash_attention_backward.default,
        aten._efficient_attention_backward.default,
    ],
)
def test_seeds_of_attention_are_not_read(backward, device):
    """They are on the CPU or on the GPU, which no trace knows; a kernel that reads them elsewhere ends the process."""
    rows, seed = torch.full((2, 4, 8, 16), 7.0), torch.empty((), dtype=torch.long, device=device)
    names = [argument.name for argument in backward._schema.arguments if not argument.kwarg_only]
    numbers = {"dropout_p": 0.125, "philox_seed": seed, "philox_offset": seed, "rng_state": seed, "max_q": 8}
    args, kwargs = lone_calls.made_up(backward, tuple(numbers.get(name, rows) for name in names), {"scale": None})
    found = dict(zip(names, args, strict=True))
    assert {one.device.type for one in args if isinstance(one, torch.Tensor)} == {"cpu"}
    assert (found["dropout_p"], kwargs) == (0.0, {"scale": None})
    assert float(found["query"].max()) == 1.0
    forward = aten._scaled_dot_product_efficient_attention.default
    assert lone_calls.made_up(forward, (rows, rows, rows, None, True, 0.125), {})[0][5] == 0.125


def test_what_stands_for_a_tensor_has_no_known_values():
    """On a GPU, reading where there is no memory is an error that ends every further call of the process."""
    values = KnownValues()
    stand_in, real = StandIns().like(torch.ones(4)), torch.ones(4)
    values.pin(stand_in)
    values.pin(real)
    assert values.of(stand_in) is None
    assert values.of(real) is real
