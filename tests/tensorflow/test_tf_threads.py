"""How many threads TensorFlow has, as far as it can be known before it makes them."""

from __future__ import annotations

import os

import pytest

from remat.tensorflow.trace.threads import executor_threads, kernel_threads


@pytest.mark.parametrize(
    ("threads", "name"), [(kernel_threads, "TF_NUM_INTRAOP_THREADS"), (executor_threads, "TF_NUM_INTEROP_THREADS")]
)
def test_as_the_environment_says_or_one_for_each_core_of_this_process(threads, name, monkeypatch):
    monkeypatch.setenv(name, "3")
    assert threads() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 6, 7, 9, 11}, raising=False)
    monkeypatch.setenv(name, "three")
    assert threads() == 5, "TensorFlow takes no notice of it either"
    monkeypatch.delenv(name)
    assert threads() == 5
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert threads() == 7


def test_as_tensorflow_was_told(monkeypatch):
    monkeypatch.setattr("tensorflow.config.threading.get_intra_op_parallelism_threads", lambda: 2)
    monkeypatch.setattr("tensorflow.config.threading.get_inter_op_parallelism_threads", lambda: 6)
    assert (kernel_threads(), executor_threads()) == (2, 6)
