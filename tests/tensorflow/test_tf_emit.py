"""A plan as it stands in the rewritten function: the right copies, in the schedule's order, and really late."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf
from small_steps import BATCH, DEPTH, WIDTH, Chain, copies_in, inputs

import remat
import remat.testing
from remat.fit.variants import Variants
from remat.running.cost_model import get_profile
from remat.tensorflow import measure
from remat.tensorflow._traces import call_when_traced
from remat.tensorflow.early_updates import EarlyUpdates
from remat.tensorflow.emit.emit import emit
from remat.tensorflow.loops.variants import Variant
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.peak.candidates import ExecutedFunction
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.peak.spans import span_starts
from remat.tensorflow.trace.func_graph import trace_func_graph

pytestmark = pytest.mark.other_cpu


@dataclasses.dataclass
class Written:
    """A function that was rewritten by a plan for it."""

    plan: remat.Plan
    step: Any
    copies: tuple[tf.Operation, ...]
    function: Any


def write(budget, rewrite=True, chain=None, one_by_one=False, updates=False):
    """A chain's training step, planned by tensors alone: the schedule is the planner's, whatever the device counts."""
    chain = chain or Chain()
    found = {}

    @tf.function(autograph=False)
    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(chain(x)))
        graph = tf.compat.v1.get_default_graph()

        def finish(succeeded):
            step = trace_func_graph(graph, profile=get_profile("cpu"))
            step = EarlyUpdates().moved(step) if updates else step
            plan = remat.plan(step.graph, budget, planner="peak_greedy")
            plan = dataclasses.replace(plan, one_by_one=one_by_one)
            found.update(step=step, plan=plan, copies=emit(plan, step).copies if rewrite else ())

        call_when_traced(finish)
        gradients = tape.gradient(loss, chain.weights)
        if updates:
            for weight, gradient in zip(chain.weights, gradients, strict=True):
                weight.assign_sub(gradient)
        return gradients

    function.get_concrete_function(inputs())
    return Written(function=function, **found)


@pytest.fixture(scope="module")
def written():
    return write("65%")


def test_every_further_run_is_a_copy(written):
    copies = copies_in(written.function.get_concrete_function(inputs()))

    assert len(written.copies) == written.plan.recomputed > 0
    assert {op.name for op in copies} == {op.name for op in written.copies}
    again = [index for place, index in enumerate(written.plan.schedule) if index in written.plan.schedule[:place]]
    assert [op.type for op in written.copies] == [written.step.graph.ops[index].kind for index in again]


def test_plain_plan_writes_nothing():
    plain = write("100%")

    assert plain.plan.recomputed == 0
    assert plain.copies == ()


def test_large_operations_wait_for_the_span_before(written):
    """Each one depends, by data or control edge, on all large ones of the span before; near the peak, on one."""
    spans = spans_of(written, span_starts(written.step.graph, written.plan.schedule))
    assert max(len(span) for span in spans) > 2
    assert sum(len(span) == 1 for span in spans) > 2
    assert_each_waits_for_the_one_before(spans)


def test_large_operations_wait_for_the_one_before_where_the_plan_says_so():
    ordered = write("65%", one_by_one=True)
    spans = spans_of(ordered, range(len(ordered.plan.schedule)))
    assert max(len(span) for span in spans) == 1
    assert_each_waits_for_the_one_before(spans)


def spans_of(written, starts):
    """The operations that make large tensors, as they stand between two of ``starts``."""
    runs: dict[int, int] = {}
    copies = iter(written.copies)
    spans: list[list[tf.Operation]] = []
    for position, index in enumerate(written.plan.schedule):
        if position in starts:
            spans.append([])
        operation = next(copies) if runs.get(index) else written.step.operations[index]
        runs[index] = runs.get(index, 0) + 1
        op = written.step.graph.ops[index]
        touched = [written.step.graph.tensors[t] for t in op.outputs]
        if any(t.size_bytes >= BATCH * WIDTH * 4 and t.alias_of is None for t in touched):
            spans[-1].append(operation)
    spans = [span for span in spans if span]
    assert sum(len(span) for span in spans) > 2 * len(written.copies) > 4
    return spans


def assert_each_waits_for_the_one_before(spans):
    for earlier, later in itertools.pairwise(spans):
        for operation in later:
            for before in set(earlier) - ancestors(operation):
                pytest.fail(f"{operation.name} may run before {before.name}")


def test_an_order_takes_time_where_several_threads_would_share_it(written, monkeypatch):
    """Recomputation apart: on one thread a plan takes what its operations take."""
    candidate = ExecutedFunction(Variants([lambda: Variant(written.step)]), AllocatorModel(min_counted_bytes=0), 0)

    def seconds(kernel, executor, plan):
        monkeypatch.setattr("remat.tensorflow.peak.candidates.kernel_threads", lambda: kernel)
        monkeypatch.setattr("remat.tensorflow.peak.candidates.executor_threads", lambda: executor)
        return candidate.expected_time_s(plan)

    for plan in (None, written.plan):
        assert seconds(1, 2, plan) == seconds(2, 1, plan) == seconds(1, 1, plan)
    plain, planned = (seconds(2, 2, plan) / seconds(1, 1, plan) for plan in (None, written.plan))
    assert 1 < plain < planned < 1.18 + 1e-9


def unawaited_reads(written):
    """For each update of a variable, what reads the value before it and may still run when it begins."""
    operations = {op.name: op for op in written.step.operations} | {op.name: op for op in written.copies}
    found = {}
    for name, update in operations.items():
        if update.type == "AssignSubVariableOp":
            handle = update.inputs[0]
            reads = [op for op in operations.values() if op.type == "ReadVariableOp" and op.inputs[0] is handle]
            readers = {reader.name for read in reads for reader in read.outputs[0].consumers()}
            assert readers
            found[name] = readers - {op.name for op in ancestors(update)}
    return found


def test_the_update_of_a_variable_waits_for_those_that_read_the_value_before():
    """While one reads it, an update writes into a copy, which then is the variable: in a hole, at worst."""
    assert any(unawaited_reads(write("65%", rewrite=False, updates=True)).values())

    written = write("65%", updates=True)
    updates = unawaited_reads(written)
    assert len(updates) == DEPTH
    assert not any(updates.values())
    awaited = {op for one in written.step.operations if one.name in updates for op in one.control_inputs}
    forward = {op.name for op in written.step.operations if op.type == "MatMul" and "gradient" not in op.name}
    assert len(forward) == DEPTH
    assert forward.isdisjoint(op.name for op in awaited), "a fused product has no control edge"


def ancestors(operation):
    found, stack = set(), [operation]
    while stack:
        op = stack.pop()
        for before in {t.op for t in op.inputs} | set(op.control_inputs):
            if before not in found:
                found.add(before)
                stack.append(before)
    return found


def test_copies_read_copies_of_what_was_dropped(written):
    """A recomputed chain may not hold on to the first instance that it was meant to let go of."""
    newest: dict[int, str] = {}
    copies = iter(written.copies)
    seen: set[int] = set()
    for index in written.plan.schedule:
        operation = next(copies) if index in seen else written.step.operations[index]
        seen.add(index)
        op = written.step.graph.ops[index]
        for position, tensor in enumerate(op.inputs):
            if tensor in newest:
                assert seen_through(operation.inputs[position]).name == newest[tensor]
        for tensor, output in zip(op.outputs, operation.outputs, strict=True):
            newest[tensor] = output.name


def seen_through(tensor):
    """What an input that waits, or that is hidden from the graph optimizer, really is."""
    return tensor.op.inputs[0] if tensor.op.type in ("PlaceholderWithDefault", "DeepCopy") else tensor


def saved_bytes():
    """What a plan saves of the peak, predicted and measured."""
    plain, planned = write("65%", rewrite=False), write("65%")
    x = inputs()
    plain_peak, planned_peak = (measure(one.function, x, repeats=2).peak_bytes for one in (plain, planned))
    return plain.plan.baseline_peak_bytes - planned.plan.peak_bytes, plain_peak - planned_peak


def saved_bytes_in_a_process_of_its_own():
    """The process itself is measured where no counter is: what other tests left in this one is in its peak."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_executor_keeps_the_copies_and_the_memory():
    """Fails if the graph optimizer folds the copies back, or runs them early."""
    predicted, measured = saved_bytes() if current_device().has_counter else saved_bytes_in_a_process_of_its_own()

    assert predicted > 4 * BATCH * WIDTH * 4
    assert measured > 0.7 * predicted


class ManyLight:
    """A chain of so many operations that each result is less than a thousandth of what they come to."""

    def __init__(self):
        self.weights = [tf.Variable(tf.ones(WIDTH))]

    def __call__(self, x):
        x = x * self.weights[0]
        for _ in range(1200):
            x = tf.tanh(x)
        return x


def test_light_tensors_are_held_in_order_where_they_are_many():
    found = write("90%", chain=ManyLight())
    largest = max(t.size_bytes for t in found.step.graph.tensors)
    assert largest < found.plan.peak_bytes / 1000
    assert len(found.copies) > 50
    assert sum(bool(copy.control_inputs) for copy in found.copies) == len(found.copies)


def test_plan_for_another_graph_writes_nothing(written):
    other = write("100%")

    with pytest.raises(remat.PlanMismatch):
        emit(written.plan, dataclasses.replace(other.step, graph=remat.testing.chain(3)))
    assert not copies_in(other.function.get_concrete_function(inputs()))


if __name__ == "__main__":
    print(json.dumps(saved_bytes()))
