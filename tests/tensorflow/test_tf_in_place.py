"""Operations whose result takes over the buffer of what they read: predicted and measured beside each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

import remat
import remat.tensorflow

ROWS, COLUMNS = 512, 2048  # 4 MiB.

CASES = {
    "SparseSoftmaxCrossEntropyWithLogits": lambda z, given: tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
        features=z, labels=given.labels
    )[1],
    "SoftmaxCrossEntropyWithLogits": lambda z, given: tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=z, labels=given.shares
    )[1],
    "Select": lambda z, given: tf.raw_ops.Select(condition=given.mask, x=z, y=given.other),
    "SelectV2": lambda z, given: tf.where(given.mask, z, given.other),
    "SelectV2 of a number": lambda z, given: tf.where(given.mask, 0.0, z),
    "SelectV2 by rows": lambda z, given: tf.where(given.mask[:, :1], z, given.other),
    "MatrixBandPart": lambda z, given: tf.linalg.band_part(z, 2, 2),
    "MatrixSetDiagV3": lambda z, given: tf.linalg.set_diag(z, tf.zeros(ROWS)),
    "Softmax": lambda z, given: tf.nn.softmax(z),
    "not Cumsum": lambda z, given: tf.cumsum(z, axis=1),
    "not the labels of SoftmaxCrossEntropyWithLogits": lambda z, given: tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=given.other, labels=z
    )[1],
}


def made():
    """What the operations read beside the product; made here, since other tests count what lies in the process."""
    other = tf.random.normal((ROWS, COLUMNS), seed=1)
    labels = tf.random.uniform((ROWS,), 0, COLUMNS, tf.int32, seed=3)
    shares = tf.one_hot(labels, COLUMNS)
    return SimpleNamespace(other=other, mask=other > 0.5, labels=labels, shares=shares)


@pytest.mark.parametrize("name", CASES)
def test_predicted_and_measured(name):
    beside, factor = made(), tf.random.normal((COLUMNS, 8), seed=2)

    def step(left, right):
        return tf.matmul(CASES[name](tf.matmul(left, right), beside), factor)

    given = tf.random.normal((ROWS, 8)), tf.random.normal((8, COLUMNS))
    graph = remat.tensorflow.trace(step, *given)
    predicted = remat.simulate(graph, graph.plain_schedule).peak_bytes - graph.pinned_bytes
    run = tf.function(step)
    for _ in range(2):
        run(*given)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    run(*given)
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before

    assert predicted == pytest.approx(measured, rel=0.05)
