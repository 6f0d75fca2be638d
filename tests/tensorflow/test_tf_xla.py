"""Under XLA: recomputations stay late, the numbers stay, and the compiled program is what the budget speaks of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import remat.tensorflow
from remat.tensorflow import xla_memory, xla_ties
from remat.tensorflow.device import current_device

LAYERS, WIDTH, BATCH = 24, 512, 4096


def make_step(weights: list[tf.Variable], **limit: object):
    tapes = []

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        tape = remat.tensorflow.GradientTape(**limit) if limit else tf.GradientTape()
        tapes.append(tape)
        with tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_sum(h * h)
        return [loss, *tape.gradient(loss, weights)]

    return step, tapes


def peak_of(step, x: tf.Tensor) -> int:
    device = current_device()
    step(x)
    device.reset_peak()
    step(x)
    return device.peak_bytes


@pytest.fixture(scope="module")
def chain() -> tuple[list[tf.Variable], tf.Tensor]:
    random = np.random.default_rng(0)
    weights = [tf.Variable(random.normal(size=(WIDTH, WIDTH)).astype("float32") * 0.05) for _ in range(LAYERS)]
    return weights, tf.constant(random.normal(size=(BATCH, WIDTH)).astype("float32"))


def test_compiled_step_keeps_its_budget_and_its_numbers(chain) -> None:
    weights, x = chain
    plain, _ = make_step(weights)
    plain_peak = peak_of(plain, x)
    expected = [t.numpy() for t in plain(x)]

    limited, tapes = make_step(weights, budget="65%")
    peak = peak_of(limited, x)
    plan = tapes[-1].plan
    assert plan is not None
    assert plan.recomputed > 0
    assert len(tapes[-1].recomputed_operations) == plan.recomputed
    assert peak <= plan.budget_bytes < plain_peak
    assert peak == pytest.approx(plan.peak_bytes, rel=0.05)
    for want, got in zip(expected, limited(x), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint8"])
def test_a_tie_changes_no_bit(dtype: str) -> None:
    special = [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan] if "float" in dtype else [0, 1, 7, 100, 0, 3, 255]
    values = tf.cast(tf.constant(special, tf.float64 if "float" in dtype else tf.int64), dtype)

    @tf.function(jit_compile=True)
    def tied(tensor: tf.Tensor, trigger: tf.Tensor) -> tf.Tensor:
        return xla_ties.tie(tensor, xla_ties.late_zero(trigger))

    for trigger in (-3.0, 0.0, 4.0, float("nan")):
        got = tied(values, tf.fill([2, 2], trigger))
        assert got.numpy().tobytes() == values.numpy().tobytes()


def test_a_tie_survives_the_compiler() -> None:
    @tf.function(jit_compile=True)
    def step(x: tf.Tensor, trigger: tf.Tensor) -> tf.Tensor:
        return tf.tanh(xla_ties.tie(x, xla_ties.late_zero(trigger))) + tf.tanh(x)

    shape = tf.zeros([64, 64])
    program = step.experimental_get_compiler_ir(shape, shape)(stage="optimized_hlo")
    # Were the tie seen through, the two tanh would be one computation.
    assert program.count(" tanh(") == 2


PROGRAM = """HloModule m, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }, entry_computation_layout=x

%body (p: f32[256,256]) -> f32[256,256] {
  %p = f32[256,256]{1,0} parameter(0)
  %inner = f32[512,256]{1,0} broadcast(%p), dimensions={0,1}
  ROOT %out = f32[256,256]{1,0} reduce(%inner), dimensions={0}
}

ENTRY %main (a: f32[256,256], b: f32[256,256]) -> (f32[256,256], f32[256,256]) {
  %a = f32[256,256]{1,0} parameter(0)
  %b = f32[256,256]{1,0} parameter(1)
  %dot.1 = f32[256,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %fusion.1 = f32[256,256]{1,0} fusion(%dot.1), kind=kLoop, calls=%f
  %call.1 = f32[256,256]{1,0} call(%fusion.1), to_apply=%body
  %view = f32[65536]{0} bitcast(%call.1)
  %dot.2 = f32[256,256]{1,0} dot(%view, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %new = f32[256,256]{1,0} add(%b, %dot.2)
  ROOT %t = (f32[256,256]{1,0}, f32[256,256]{1,0}) tuple(%dot.2, %new)
}
"""


def test_program_memory_by_hand() -> None:
    tensor = 4 * 256 * 256
    memory = xla_memory.program_memory(PROGRAM)
    # dot.2 is an output of its own; the other output is written into parameter b.
    assert memory.output_bytes == (tensor,)
    # While call.1 runs: fusion.1, which took over dot.1; call.1; and two tensors' worth inside the body.
    assert memory.temporary_bytes == 4 * tensor
