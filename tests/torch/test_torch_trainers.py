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
    [
        {},
        {"accumulation": 2, "evaluates": True},
        {"bf16": True},
        {"resumes": True},
        {"evaluates": True, "best": True},
        {"frozen": True},
        {"lora": True},
        {"lora": True, "accumulation": 2, "bf16": True},
        {"metrics": True},
    ],
    ids=["plain", "accumulates", "bf16", "resumes", "best", "frozen", "lora", "lora_accumulates_bf16", "metrics"],
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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["timm", "torch"])
def test_an_average_of_the_weights(kind):
    found = worker(SCRIPT).ask("weight_average", kind)
    check(found)
    counted, averages = found["resident"]
    assert counted == averages > 0


@pytest.mark.thorough
@pytest.mark.parametrize("trainer", ["hugging_face", "lightning", "loop"])
def test_plans_in_weights_and_biases(trainer):
    found = worker(SCRIPT).ask("logged", trainer)
    assert found["said"]["remat/plan"] == found["plan"]
    assert found["said"]["remat/budget_bytes"] == found["budget"]
    assert found["said"]["remat/predicted_peak_bytes"] == found["predicted"]
    assert found["said"]["remat/measured_peak_bytes"] == found["measured"] > 0
    assert found["written"]
    assert found["is_off"]
    assert found["steps"] == (2 if trainer == "loop" else 0)  # A plan takes no step of the run for itself.


class Run:
    def __init__(self):
        self.said = []

    def log(self, data, commit):
        assert not commit
        self.said.append(data)


def test_a_plan_is_logged_when_it_is_made_and_when_it_is_measured():
    model, x, run = model_of_layers(), rows(), Run()
    loss_fn = remat.torch.limit_memory(
        lambda x: model(x).square().mean(), "1GiB", mode="eager", planner="peak_greedy", time_limit_s=0.2
    )
    log = remat.torch.trainers.PlanLog(run)
    loss = loss_fn(x)
    log(loss_fn.plans)
    log(loss_fn.plans)
    loss.backward()
    log(loss_fn.plans)
    log(loss_fn.plans)
    before, after = run.said
    assert "remat/measured_peak_bytes" not in before
    (plan,) = loss_fn.plans
    assert after["remat/measured_peak_bytes"] == plan.measured_peak_bytes
    assert after["remat/plan"] == str(plan)
    loss_fn(x[:8]).backward()
    log(loss_fn.plans)
    assert len(run.said) == 3
    with pytest.raises(TypeError, match="a run of Weights & Biases"):
        remat.torch.trainers.PlanLog("logs")


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
