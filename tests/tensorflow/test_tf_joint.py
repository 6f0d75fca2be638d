"""How micro-batches of several sizes are timed on a machine that does other work, too."""

from __future__ import annotations

import pytest
import tensorflow as tf

from remat.tensorflow import joint
from remat.tensorflow.joint import Pieces
from remat.tensorflow.micro_batches import for_each_micro_batch

LEAVES = [tf.zeros((8, 3))]


def run(leaves, on_body):
    def body(pieces, size, carried):
        on_body(leaves, pieces)
        return [carried[0] + tf.reduce_sum(pieces[0])]

    return for_each_micro_batch(leaves, tf.shape(leaves[0])[0], joint.TIMED_PIECES, body, [tf.zeros(())])


@pytest.mark.parametrize(
    ("wall_s", "times_s"),
    [
        pytest.param({2: 0.06, 4: 0.1}, {2: 0.03, 4: 0.05}, id="an idle machine of two cores"),
        pytest.param({2: 0.9, 4: 0.1}, {2: 0.05, 4: 0.1}, id="one size had to wait for a core"),
    ],
)
def test_a_wait_for_a_core_is_no_cost_of_a_size(monkeypatch, wall_s, times_s):
    processor_s = {2: 0.1, 4: 0.2}
    monkeypatch.setattr(
        joint, "_seconds", lambda function, batch: (wall_s[len(batch[0]) // 2], processor_s[len(batch[0]) // 2])
    )

    assert Pieces(run, LEAVES, [(8, 3)], in_xla=False).times_s([2, 4]) == pytest.approx(times_s)


def test_both_clocks_are_read():
    wall_s, processor_s = joint._seconds(tf.function(lambda x: tf.linalg.matmul(x, x)), [tf.ones((200, 200))])

    assert wall_s > 0
    assert processor_s > 0
