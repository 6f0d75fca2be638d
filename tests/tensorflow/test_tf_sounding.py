"""Which holes TensorFlow's heap has: in a process of its own, whose heap nobody else has used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from remat.tensorflow.peak.device import Device
from remat.tensorflow.peak.sounding import free_chunks

MIB = 1 << 20

HOLES = """
import tensorflow as tf
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.peak.sounding import free_chunks
device = current_device()
def block(mib):
    return tf.raw_ops.Empty(shape=[mib << 20], dtype=tf.uint8, init=False)
held = [block(mib) for mib in (64, 3, 7, 2, 5, 4)]
before = free_chunks(device, 40 << 20)
del held[4], held[2]  # Of 5 and of 7 MiB, with others around them.
device.reset_peak()
in_use = device.counted_bytes
after = free_chunks(device, 40 << 20)
peak = device.peak_bytes
device.reset_peak()
further = free_chunks(device, 64 << 20)
print([before, after, in_use, device.counted_bytes, peak, further, device.peak_bytes])
"""

BUDGET = """
import tensorflow as tf
import remat.tensorflow
from small_steps import Chain, inputs
from remat.tensorflow.peak.device import current_device
chain, x = Chain(), inputs()
tapes = []
@tf.function
def step(x):
    with remat.tensorflow.GradientTape(budget="70%") as tape:
        loss = tf.reduce_mean(tf.square(chain(x)))
    tapes.append(tape)
    return tape.gradient(loss, chain.weights)
device = current_device()
device.reset_peak()
step.get_concrete_function(x)
print([device.counted_bytes, device.peak_bytes, tapes[-1].plan.budget_bytes])
"""

IN_PIECES = """
import re
import tensorflow as tf
import remat, remat.tensorflow
from small_steps import Chain, inputs
from remat.tensorflow.peak.device import current_device
device = current_device()
def block(kib):
    return tf.raw_ops.Empty(shape=[kib << 10], dtype=tf.uint8, init=False)
first = block(64 << 10)  # The next region is as large, and all pieces lie in it.
held = [block(4 << 10) for _ in range(14)]
chain, x = Chain(), inputs(2048)  # Activations of 2 MiB.
def step_within(budget):
    @tf.function(autograph=False)
    def step(x):
        with remat.tensorflow.GradientTape(budget=budget) as tape:
            loss = tf.reduce_mean(tf.square(chain(x)))
        return tape.gradient(loss, chain.weights)
    return step
def refused(budget):
    try:
        step_within(budget)(x)
    except remat.InfeasibleBudget as error:
        elsewhere = re.search(r"in pieces .* where (\\d+) ", str(error))
        return error.minimum_bytes, int(elsewhere[1]) if elsewhere else 0
    return 0, 0
beginnings = []
for number in range(len(held)):
    held[number] = None
    beginnings.append(block(256))  # Leaves of a hole what one activation takes whole.
    held[number] = block(3840)
del held, first
here, elsewhere = refused(1)
step = step_within(here)
step(x)
device.reset_peak()
step(x)
print([here, elsewhere, refused(elsewhere), device.peak_bytes])
"""


def printed_by(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.skipif(not Device("CPU:0").has_counter, reason="there is no heap without a counter")
def test_holes_of_a_heap_are_found():
    before, after, in_use, left, peak, further, further_peak = printed_by(HOLES)

    assert [hole for hole in after if hole in (5 * MIB, 7 * MIB)] == [7 * MIB, 5 * MIB], "the lowest address first"
    assert not {5 * MIB, 7 * MIB} & set(before)
    assert left == in_use, "all is given back"
    assert in_use + 38 * MIB < peak <= in_use + 40 * MIB
    # What is left of the region of 64 MiB that 3, 7, 2, 5 and 4 were cut from: it holds all 40, and not all 64.
    assert set(further) - set(after) == {43 * MIB}
    assert in_use + 62 * MIB < further_peak <= in_use + 64 * MIB


@pytest.mark.skipif(not Device("CPU:0").has_counter, reason="there is no heap without a counter")
def test_looking_for_holes_keeps_the_budget():
    """A trace is in what others measure, such as a function that calls this one."""
    in_use, peak, budget = printed_by(BUDGET)

    assert in_use < peak <= budget


@pytest.mark.skipif(not Device("CPU:0").has_counter, reason="there is no heap without a counter")
def test_a_heap_in_pieces_is_planned_for_as_it_is():
    """A block takes all of a hole that has less than twice its bytes."""
    here, elsewhere, refused, peak = printed_by(IN_PIECES)

    assert here > 1.1 * elsewhere > 0
    assert refused == (here, elsewhere), "within what a heap in one piece would keep"
    assert 0.8 * here < peak <= here


def test_nothing_is_known_of_heaps_that_cannot_be_looked_into():
    assert free_chunks(Device("GPU:0"), MIB) is None
    assert free_chunks(Device("CPU:0", shared_by=2), MIB) is None
    assert free_chunks(Device("CPU:0"), -MIB) is None
