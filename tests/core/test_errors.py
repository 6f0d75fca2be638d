"""Errors travel between processes with what they tell."""

from __future__ import annotations

import pickle

import pytest

from remat.core import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.InfeasibleBudget("too little", minimum_bytes=20, budget_bytes=10, binding_op="matmul"),
        errors.InvalidSchedule("missing op", "op 3 never runs"),
        errors.UnsupportedStep("shapes must be fixed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
