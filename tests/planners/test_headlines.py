"""What earlier tools were known for, asked of traces of the same models."""

from __future__ import annotations

from pathlib import Path

import pytest

import remat

GRAPHS = Path(__file__).parents[2] / "benchmarks" / "graphs"


@pytest.mark.slow
def test_resnet152_in_a_quarter_of_its_memory() -> None:
    """gradient-checkpointing took a ResNet-152 on ImageNet from 5606 to 1406 MB for 18 % more time."""
    graph = remat.load_graph(GRAPHS / "resnet152.json.gz")
    plain_bytes = remat.simulate(graph, tuple(range(len(graph.ops)))).peak_bytes
    plan = remat.plan(graph, budget=plain_bytes * 1406 // 5606, time_limit_s=60)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.overhead <= 0.18


@pytest.mark.slow
def test_bert_large_with_four_times_the_batch() -> None:
    """bert4keras trained BERT-large with four times the batch in the same memory, for 25 % more time per sample.

    The activations of four batches in the room of one are a quarter of their plain peak; the trace holds no weights.
    """
    graph = remat.load_graph(GRAPHS / "bert_large.json.gz")
    plan = remat.plan(graph, budget="25%")
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.overhead <= 0.18
