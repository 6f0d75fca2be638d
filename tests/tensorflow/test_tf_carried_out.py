"""Which runs of a schedule TensorFlow carries out."""

from __future__ import annotations

from types import SimpleNamespace

import tensorflow as tf

from remat import Graph, Op, Tensor
from remat.core.plan import plan_for_schedule
from remat.running.cost_model import get_profile
from remat.tensorflow.emit.emit import _Emitter
from remat.tensorflow.peak.carried_out import carried_out, carried_out_at
from remat.tensorflow.peak.spans import span_starts
from remat.tensorflow.trace.func_graph import trace_func_graph

# 0 and 1 each read the one before; 2 reads nothing; 3 reads 1 and 2.
GRAPH = Graph(
    (Op(outputs=(0,)), Op(inputs=(0,), outputs=(1,)), Op(outputs=(2,)), Op(inputs=(1, 2), outputs=(3,))),
    (Tensor(4),) * 4,
    outputs=(3,),
    free_order=False,
)


def step_of(function):
    """The trace of a function of a vector."""
    concrete = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([8]))
    return trace_func_graph(concrete.graph, profile=get_profile("cpu"))


def known_to_its_graph(graph):
    """A step whose operations are read by nobody whom its graph does not know."""
    operation = SimpleNamespace(name="", outputs=(), _control_outputs=())
    return SimpleNamespace(graph=graph, operations=(operation,) * len(graph.ops))


def test_a_run_is_left_out_with_what_it_alone_reads():
    step = known_to_its_graph(GRAPH)
    assert carried_out(step, (0, 1, 2, 0, 1, 3)) == (2, 0, 1, 3)
    assert carried_out(step, (0, 1, 2, 1, 3)) == (0, 2, 1, 3)
    assert carried_out(step, (0, 0, 1, 2, 3)) == (0, 1, 2, 3)


def test_runs_that_are_read_stay():
    step = known_to_its_graph(GRAPH)
    for schedule in (GRAPH.plain_schedule, (0, 1, 0, 1, 2, 3)[2:], (2, 0, 1, 3)):
        assert carried_out(step, schedule) == schedule


def test_the_last_run_of_an_op_that_nobody_reads_stays():
    graph = Graph((Op(outputs=(0,)), Op(outputs=(1,))), (Tensor(4), Tensor(4)), outputs=(1,), free_order=False)
    assert carried_out(known_to_its_graph(graph), (0, 1, 0)) == (0, 1)


def test_a_run_stays_whose_shape_somebody_reads():
    """To the graph that reads nothing, but in the function it reads the first run."""

    def function(x, reads_shape):
        inner = tf.exp(x, name="inner")
        size = tf.raw_ops.Shape(input=inner) if reads_shape else tf.raw_ops.Shape(input=x)
        outer = tf.sin(x) * tf.cast(size[0], tf.float32)
        return tf.add(inner, outer, name="both")

    for reads_shape in (True, False):
        step = step_of(lambda x, reads_shape=reads_shape: function(x, reads_shape))
        names = [op.name for op in step.graph.ops]
        plain, inner, both = step.graph.plain_schedule, names.index("inner"), names.index("both")
        schedule = (*plain[:both], inner, *plain[both:])
        first = inner if reads_shape else inner + 1
        assert carried_out(step, schedule) == (*plain[:inner], *plain[first:both], inner, *plain[both:])


def test_spans_are_written_as_they_are_replayed():
    """What is left out holds nothing, so that spans are longer than those of the whole schedule."""

    def function(x):
        inner = tf.exp(x, name="inner")
        outer = tf.sin(tf.cos(tf.tanh(x)))
        return tf.add(inner, outer, name="both")

    step = step_of(function)
    names = [op.name for op in step.graph.ops]
    plain, both = step.graph.plain_schedule, names.index("both")
    plan = plan_for_schedule(step.graph, (*plain[:both], names.index("inner"), *plain[both:]), planner="by hand")
    replayed = span_starts(step.graph, carried_out(step, plan.schedule))

    at = carried_out_at(step, plan.schedule)

    assert replayed != span_starts(step.graph, plan.schedule)
    assert _Emitter(plan, step)._span_starts() == {at[start] for start in replayed}
