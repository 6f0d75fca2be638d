"""The lever "update": updates inside of the backward pass, to the bit those of ``optimizer.step()``."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
import remat.torch
from remat.core.plan import load_plan_and_graph
from remat.torch import _private

WIDTH, WORDS = 64, 100
LEVERS = ("recompute", "update")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Language(nn.Module):
    """A Transformer whose head has the embedding's weights; one parameter is frozen, and one is never used."""

    def __init__(self, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].mlp[1].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


class Run:
    """Some steps of training, plainly or within a budget."""

    def __init__(
        self, make_optimizer=adam, batch=1, *, layers=1, levers=None, budget="100%", before=None, steps=3, **options
    ):
        self.model = Language(layers)
        self.optimizer = make_optimizer(self.model.parameters())
        if before is not None:
            before(self.optimizer)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.tokens = torch.arange(batch * 8).remainder(WORDS).view(batch, 8)
        self.plan = self.applied = None
        if levers is not None:
            self.plan = remat.torch.plan(
                self.loss, budget=budget, optimizer=self.optimizer, levers=levers, planner="peak_greedy", **options
            )
            self.applied = remat.torch.apply(self.plan)
        for _ in range(steps):
            self.step()

    def loss(self):
        return F.cross_entropy(self.model(self.tokens).flatten(0, 1), self.tokens.flatten())

    def forward(self):
        if self.applied is None:
            return self.loss()
        with self.applied:
            return self.loss()

    def step(self):
        self.forward().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def numbers(self):
        state = self.optimizer.state
        slots = [state[p][name] for p in self.model.parameters() for name in sorted(state.get(p, {}))]
        return [*(p.detach() for p in self.model.parameters()), *(s for s in slots if isinstance(s, torch.Tensor))]

    def measured(self):
        return remat.torch.measure(self.step, repeats=1).peak_bytes

    @property
    def gradient_bytes(self):
        return sum(p.numel() * 4 for p in self.model.parameters() if p.requires_grad) - 12


def same(one, other):
    pairs = list(zip(one.numbers(), other.numbers(), strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


OPTIMIZERS = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "AdamW": {"foreach": True},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "lr": 0.01},
}


QUICK = ("Adam", "AdamW", "SGD")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in OPTIMIZERS]
)
def test_an_update_alone_is_that_of_the_step(name):
    """Over several steps, with the state of each parameter and of its optimizer."""
    runs = []
    for levers in (None, ("update",)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        train(model, torch.linspace(-1, 1, 16).view(1, 16), optimizer, levers)
        state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
        runs.append([*model.parameters(), *(v for v in state if isinstance(v, torch.Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def train(model, x, optimizer, levers):
    """Some steps; where there are levers, within a plan, which is returned."""
    plan, planned = None, contextlib.nullcontext()
    if levers is not None:
        plan = remat.torch.plan(lambda: model(x).square().mean(), budget="100%", optimizer=optimizer, levers=levers)
        planned = remat.torch.apply(plan)
        assert plan.early, "nothing is updated early"
    for _ in range(3):
        with planned:
            loss = model(x).square().mean()
        loss.backward()
        early = [] if plan is None else plan.early
        assert all(type(parameter.grad).__name__ == "SpentGradient" for parameter in early)
        optimizer.step()
        assert all(parameter.grad is None for parameter in early)
        optimizer.zero_grad()
    return plan


def test_the_peak_falls_by_nearly_the_gradients():
    """Tied weights, a frozen and an unused parameter, a scheduler: all as in plain training."""
    plain, early = Run(layers=5), Run(layers=5, levers=LEVERS)

    assert same(plain, early)
    assert torch.equal(early.model.unused, torch.ones(3))
    plan = early.plan
    peaks = plain.measured(), early.measured()
    assert peaks[0] - peaks[1] > 0.75 * early.gradient_bytes
    assert plan.peak_bytes == pytest.approx(peaks[1], rel=0.01)
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.baseline_peak_bytes == pytest.approx(peaks[0], rel=0.01)
    assert plan.update.saved_bytes == plan.baseline_peak_bytes - plan.peak_bytes
    assert not plan.update.bound_by
    assert "run as soon as their gradient is final" in str(plan)


@pytest.mark.thorough
def test_recomputations_beside_early_updates():
    plain = Run(layers=4, batch=12)
    alone = Run(layers=4, batch=12, levers=("update",))
    budget = int(0.93 * alone.plan.peak_bytes)
    early = Run(layers=4, batch=12, levers=LEVERS, budget=budget)

    assert same(plain, early)
    assert early.plan.recomputed > 0
    assert not early.applied.departures
    assert early.measured() <= budget
    assert early.plan.peak_bytes == pytest.approx(early.measured(), rel=0.01)
    with pytest.raises(remat.InfeasibleBudget, match="nothing recomputed, as levers= asks for"):
        Run(layers=4, batch=12, levers=("update",), budget=budget)


def clipping(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    optimizer.register_step_pre_hook(clip)


def test_clipping_before_each_step_binds():
    plain, bound = Run(before=clipping), Run(before=clipping, levers=LEVERS)

    assert same(plain, bound)
    assert not bound.plan.early
    assert "clip" in bound.plan.update.bound_by
    assert bound.plan.update.waiting_bytes == pytest.approx(bound.gradient_bytes, rel=0.01)
    assert "of gradients wait for clipping.<locals>.clip" in str(bound.plan)
    assert bound.measured() == pytest.approx(plain.measured(), rel=0.01)


def test_gradients_of_earlier_pieces_bind():
    model = Language()
    plan = remat.torch.plan(
        lambda: model(torch.zeros(1, 8, dtype=torch.long)).mean(),
        budget="100%",
        optimizer=adam(model.parameters()),
        accumulates=True,
        levers=LEVERS,
    )
    assert not plan.early
    assert "wait for the gradients of earlier micro-batches" in str(plan)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0), id="clipping"),
        pytest.param(lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0), id="clipping values"),
        pytest.param(lambda run: run.loss().backward(), id="accumulation"),
        pytest.param(lambda run: run.model.head.weight.grad.norm(), id="a look"),
        pytest.param(lambda run: scaled(run.optimizer), id="a gradient scaler"),
    ],
)
def test_whoever_reads_a_spent_gradient_is_told(read):
    run = Run(levers=LEVERS)
    run.forward().backward()

    with pytest.raises(
        remat.UnsupportedStep, match=r"that the lever 'update' has used and let go of.*leave 'update' out"
    ):
        read(run)


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def test_a_step_that_runs_the_backward_pass_is_refused():
    run = Run(levers=LEVERS)
    with pytest.raises(remat.UnsupportedStep, match=r"step\(closure\)"):
        run.optimizer.step(lambda: None)


def test_hooks_of_the_optimizer_and_its_state():
    """One call of each hook a step, and a state that an equal optimizer takes."""
    calls = []
    run = Run(levers=LEVERS)
    run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run.step()
    assert calls == ["after"]
    plain = Run()
    plain.optimizer.load_state_dict(run.optimizer.state_dict())
    steps = {float(state["step"]) for state in plain.optimizer.state.values()}
    assert steps == {4.0}


def test_other_backward_passes_are_left_alone():
    run = Run(levers=LEVERS)
    before = run.model.head.weight.detach().clone()
    run.loss().backward()  # Outside of ``apply``.
    assert torch.equal(run.model.head.weight, before)
    assert run.model.head.weight.grad.abs().sum() > 0


class ReadLate(nn.Module):
    """The gradient of ``low`` needs the value of ``high``, whose own gradient is there before."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))
        self.free = nn.Linear(8, 8)

    def forward(self, x):
        return self.free(x @ (self.low @ self.high.detach())) @ self.high


def test_a_parameter_that_is_read_after_its_gradient_waits():
    runs = []
    for levers in (None, LEVERS):
        torch.manual_seed(0)
        module, x = ReadLate(), torch.linspace(0, 1, 16).view(2, 8)
        plan = train(module, x, torch.optim.SGD(module.parameters(), lr=0.1), levers)
        if plan is not None:
            assert not any(one is module.high for one in plan.early)
            assert any(one is module.low for one in plan.early)
        runs.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_two_parameters_in_one_storage_wait():
    one = nn.Linear(8, 8, bias=False)
    other = nn.Linear(8, 8, bias=False)
    other.weight.data = one.weight.data
    optimizer = torch.optim.SGD([one.weight, other.weight], lr=0.1)
    plan = remat.torch.plan(
        lambda x: other(one(x)).square().mean(), torch.rand(2, 8), budget="100%", optimizer=optimizer, levers=LEVERS
    )
    assert not plan.early


def test_a_plan_from_a_file(tmp_path):
    early = Run(levers=LEVERS, steps=0)
    early.plan.save(tmp_path / "plan.json", early.plan.graph)
    loaded, graph = load_plan_and_graph(tmp_path / "plan.json")
    again = remat.torch.plan(early.loss, plan=loaded, optimizer=early.optimizer)

    assert remat.simulate(graph, loaded.schedule).peak_bytes == early.plan.peak_bytes == again.peak_bytes
    assert again.update == early.plan.update
    assert len(again.early) == len(early.plan.early)


def test_a_function_that_returns_a_loss():
    """``limit_memory`` runs such a step in eager mode."""
    plain, early = Run(), Run()
    early.applied = None
    early.loss = remat.torch.limit_memory(early.loss, "100%", optimizer=early.optimizer, levers=("update",))
    plain.step()
    early.step()
    plain.step()
    early.step()
    assert same(plain, early)
    (plan,) = early.loss.plans
    assert (plan.mode, plan.measured_peak_bytes) == ("eager", pytest.approx(plan.peak_bytes, rel=0.01))
    assert plan.update.saved_bytes > 0


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(OwnStep, r"OwnStep has its own step\(\)", id="own step"),
        pytest.param(torch.optim.LBFGS, "LBFGS makes its update from all gradients together", id="LBFGS"),
    ],
)
def test_optimizers_that_are_refused(make, message):
    with pytest.raises(remat.UnsupportedStep, match=message):
        Run(lambda parameters: make(parameters, lr=0.1), levers=LEVERS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda f, o: remat.torch.plan(f, levers=("update",)), "give optimizer=", id="no optimizer"),
        pytest.param(lambda f, o: remat.torch.plan(f, levers=()), "is not a tuple of some of", id="none"),
        pytest.param(lambda f, o: remat.torch.plan(f, levers=("offload",)), "is not a tuple of some of", id="unknown"),
        pytest.param(
            lambda f, o: remat.torch.plan(f, levers=("split",)), "eager step cannot run in slices", id="split"
        ),
        pytest.param(
            lambda f, o: remat.torch.compile(f, backend="aten", optimizer=o, levers=LEVERS),
            "does not have the lever 'update'",
            id="graph mode",
        ),
        pytest.param(
            lambda f, o: remat.torch.limit_memory(f, mode="graph", optimizer=o, levers=LEVERS),
            "all gradients arrive together",
            id="limited in graph mode",
        ),
        pytest.param(
            lambda f, o: remat.torch.limit_memory(f, mode="eager", levers=("split",)), "needs graph mode", id="eager"
        ),
        pytest.param(
            lambda f, o: remat.torch.limit_memory(f, optimizer=o, levers=("split", "update")),
            "leave one out",
            id="both",
        ),
    ],
)
def test_what_is_refused(call, message):
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        call(lambda: module(torch.ones(1, 2)).sum(), torch.optim.SGD(module.parameters(), lr=0.1))


def test_pytorch_puts_hooks_around_steps_where_we_look():
    """A step without hooks is the one that the class defines."""
    called = []
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    assert len(_private.step_pre_hooks(optimizer)) == 1
    _private.step_without_hooks(torch.optim.SGD)(optimizer)
    assert not called
    assert parameter.tolist() == pytest.approx([0.9, 0.9])
