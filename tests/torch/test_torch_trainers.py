"""Other people's trainers within a budget: the same weights to the bit, the peak that was planned, and off again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import remat.torch
from worker_process import worker

SCRIPT = Path(__file__).parent / "trainers_worker.py"


def check(found):
    assert found["same"]
    assert found["plans"] == 1
    assert found["recomputed"] > 0
    assert found["predicted"] <= found["budget"]
    assert 0 < found["measured"] <= found["budget"]
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.03)
    assert found["is_own"]
    assert "optimizer_state" in found["roles"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2, "evaluates": True}, {"bf16": True}, {"resumes": True}, {"frozen": True}],
    ids=["plain", "accumulates", "bf16", "resumes", "frozen"],
)
def test_hugging_face(options):
    check(worker(SCRIPT).ask("hugging_face", **options))


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lightning(accumulation):
    check(worker(SCRIPT).ask("lightning", accumulation))


@pytest.mark.thorough
@pytest.mark.parametrize(("accumulation", "mixed"), [(1, None), (2, "bf16")])
def test_accelerate(accumulation, mixed):
    check(worker(SCRIPT).ask("accelerate", accumulation, mixed))


class Loss:
    """As a trainer, as far as remat looks at one."""

    def __init__(self):
        self.args, self.optimizer, self.calls = self, None, 0

    def compute_loss(self, model, inputs):
        self.calls += 1
        return model(inputs).square().mean()


def test_a_limit_on_a_trainer_is_taken_away_again():
    trainer, model, x = Loss(), model_of_layers(), rows()
    limited = remat.torch.trainers.limit_memory(trainer, "1GiB", planner="peak_greedy", time_limit_s=0.2)
    trainer.compute_loss(model, x).backward()
    assert len(limited.plans) == 1
    limited.remove()
    assert "compute_loss" not in vars(trainer)
    before = trainer.calls
    trainer.compute_loss(model, x).backward()
    assert trainer.calls == before + 1
    assert len(limited.plans) == 1


def test_evaluation_makes_no_plan():
    trainer = Loss()
    limited = remat.torch.trainers.limit_memory(trainer, "90%")
    with torch.no_grad():
        trainer.compute_loss(model_of_layers(), rows())
    assert limited.plans == []


def test_what_is_no_trainer_is_refused():
    with pytest.raises(TypeError, match=r"not Linear.*lightning_callback"):
        remat.torch.trainers.limit_memory(model_of_layers()[0], "60%")
    with pytest.raises(remat.InvalidBudget):
        remat.torch.trainers.limit_memory(Loss(), "sixty")


def model_of_layers():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def rows():
    return torch.randn(64, 8)
