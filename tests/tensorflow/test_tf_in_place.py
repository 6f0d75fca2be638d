"""Operations whose result takes over the buffer of what they read: predicted and measured beside each other."""

from __future__ import annotations

import pytest
import tensorflow as tf

import remat
import remat.tensorflow

ROWS, COLUMNS = 512, 2048  # 4 MiB.
OTHER = tf.random.normal((ROWS, COLUMNS), seed=1)
MASK = OTHER > 0.5
FACTOR = tf.random.normal((COLUMNS, 8), seed=2)
LABELS = tf.random.uniform((ROWS,), 0, COLUMNS, tf.int32, seed=3)
SHARES = tf.one_hot(LABELS, COLUMNS)

CASES = {
    "SparseSoftmaxCrossEntropyWithLogits": lambda z: tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
        features=z, labels=LABELS
    )[1],
    "SoftmaxCrossEntropyWithLogits": lambda z: tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=z, labels=SHARES)[1],
    "Select": lambda z: tf.raw_ops.Select(condition=MASK, x=z, y=OTHER),
    "SelectV2": lambda z: tf.where(MASK, z, OTHER),
    "SelectV2 of a number": lambda z: tf.where(MASK, 0.0, z),
    "SelectV2 by rows": lambda z: tf.where(MASK[:, :1], z, OTHER),
    "MatrixBandPart": lambda z: tf.linalg.band_part(z, 2, 2),
    "MatrixSetDiagV3": lambda z: tf.linalg.set_diag(z, tf.zeros(ROWS)),
    "Softmax": tf.nn.softmax,
    "not Cumsum": lambda z: tf.cumsum(z, axis=1),
    "not the labels of SoftmaxCrossEntropyWithLogits": lambda z: tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=OTHER, labels=z
    )[1],
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_and_measured(name):
    def step(left, right):
        return tf.matmul(CASES[name](tf.matmul(left, right)), FACTOR)

    given = tf.random.normal((ROWS, 8)), tf.random.normal((8, COLUMNS))
    graph = remat.tensorflow.trace(step, *given)
    made = remat.simulate(graph, graph.plain_schedule).peak_bytes - graph.pinned_bytes
    run = tf.function(step)
    for _ in range(2):
        run(*given)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    run(*given)
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before

    assert made == pytest.approx(measured, rel=0.05)
