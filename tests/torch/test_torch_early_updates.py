"""The lever "update": updates inside of the backward pass, to the bit those of ``optimizer.step()``.

In eager mode and in graph mode alike.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
import remat.torch
from remat.core.plan import load_plan_and_graph
from remat.torch import _private
from remat.torch.early_updates import worth_moving

WIDTH, WORDS = 64, 100
LEVERS = ("recompute", "update")

BOTH_MODES = pytest.mark.parametrize("mode", ["eager", "graph"])


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


def test_small_parameters_are_left_to_the_step():
    """Most parameters of a model are biases and norms, which hold next to nothing."""
    weights = [nn.Parameter(torch.ones(100, 100)) for _ in range(4)]
    small = [nn.Parameter(torch.ones(100)) for _ in range(3)]
    assert worth_moving([weights[0], small[0], weights[1], small[1], *weights[2:], small[2]]) == weights
    several = [nn.Parameter(torch.ones(100)) for _ in range(10)]  # 2.4 % of all: some of them count.
    assert len(worth_moving([*weights, *several])) == 10
    assert worth_moving(iter(weights)) == weights
    assert worth_moving([]) == []


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


class Run:
    """Some steps of training, plainly or within a budget."""

    def __init__(
        self,
        make_optimizer=adam,
        batch=1,
        *,
        layers=1,
        levers=None,
        mode="eager",
        budget="100%",
        before=None,
        steps=3,
        **options,
    ):
        self.model = Language(layers)
        self.optimizer = make_optimizer(self.model.parameters())
        if before is not None:
            before(self.optimizer)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.tokens = torch.arange(batch * 8).remainder(WORDS).view(batch, 8)
        self.applied = self.compiled = None
        options |= {"budget": budget, "optimizer": self.optimizer, "levers": levers, "planner": "peak_greedy"}
        if levers is not None and mode == "graph":
            self.compiled = remat.torch.compile(self.loss, backend="aten", **options)
        elif levers is not None:
            self.applied = remat.torch.apply(remat.torch.plan(self.loss, **options))
        for _ in range(steps):
            self.step()

    @property
    def plan(self):
        plan = (self.applied or self.compiled).plan
        assert plan.mode == ("eager" if self.compiled is None else "graph")
        return plan

    def loss(self):
        return F.cross_entropy(self.model(self.tokens).flatten(0, 1), self.tokens.flatten())

    def forward(self):
        if self.compiled is not None:
            return self.compiled()
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
@BOTH_MODES
def test_an_update_alone_is_that_of_the_step(name, mode):
    """Over several steps, with the state of each parameter and of its optimizer."""
    runs = []
    for levers in (None, ("update",)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        train(model, torch.linspace(-1, 1, 16).view(1, 16), optimizer, levers, mode)
        state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
        runs.append([*model.parameters(), *(v for v in state if isinstance(v, torch.Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def train(model, x, optimizer, levers, mode):
    """Some steps; where there are levers, within a plan. The parameters that were updated early."""
    run, planned, early = lambda: model(x).square().mean(), contextlib.nullcontext(), []
    options = {"budget": "100%", "optimizer": optimizer, "levers": levers}
    if levers is not None and mode == "graph":
        run = remat.torch.compile(run, backend="aten", **options)
    elif levers is not None:
        planned = remat.torch.apply(remat.torch.plan(run, **options))
    for _ in range(3):
        with planned:
            loss = run()
        loss.backward()
        early = [p for p in model.parameters() if type(p.grad).__name__ == "SpentGradient"]
        assert bool(early) == (levers is not None)
        optimizer.step()
        assert all(parameter.grad is None for parameter in early)
        optimizer.zero_grad()
    return early


@BOTH_MODES
def test_the_peak_falls_by_nearly_the_gradients(mode):
    """Tied weights, a frozen and an unused parameter, a scheduler: all as in plain training."""
    plain, early = Run(layers=5), Run(layers=5, levers=LEVERS, mode=mode)

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
@BOTH_MODES
def test_recomputations_beside_early_updates(mode):
    plain = Run(layers=4, batch=12)
    alone = Run(layers=4, batch=12, levers=("update",), mode=mode)
    budget = int(0.93 * alone.plan.peak_bytes)
    early = Run(layers=4, batch=12, levers=LEVERS, budget=budget, mode=mode)

    assert same(plain, early)
    assert early.plan.recomputed > 0
    assert mode == "graph" or not early.applied.departures
    assert early.measured() <= budget
    assert early.plan.peak_bytes == pytest.approx(early.measured(), rel=0.01)
    with pytest.raises(remat.InfeasibleBudget, match="nothing recomputed, as levers= asks for"):
        Run(layers=4, batch=12, levers=("update",), budget=budget, mode=mode)


def clipping(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    optimizer.register_step_pre_hook(clip)


@BOTH_MODES
def test_clipping_before_each_step_binds(mode):
    plain, bound = Run(before=clipping), Run(before=clipping, levers=LEVERS, mode=mode)

    assert same(plain, bound)
    assert not bound.plan.update.moved
    assert "clip" in bound.plan.update.bound_by
    assert bound.plan.update.waiting_bytes == pytest.approx(bound.gradient_bytes, rel=0.01)
    assert "of gradients wait for clipping.<locals>.clip" in str(bound.plan)
    if mode == "eager":
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
@BOTH_MODES
def test_whoever_reads_a_spent_gradient_is_told(read, mode):
    run = Run(levers=LEVERS, mode=mode, steps=0)
    run.forward().backward()

    with pytest.raises(
        remat.UnsupportedStep, match=r"that the lever 'update' has used and let go of.*leave 'update' out"
    ):
        read(run)


def scaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


@BOTH_MODES
def test_a_step_that_runs_the_backward_pass_is_refused(mode):
    run = Run(levers=LEVERS, mode=mode, steps=1)
    with pytest.raises(remat.UnsupportedStep, match=r"step\(closure\)"):
        run.optimizer.step(lambda: None)


@BOTH_MODES
def test_hooks_of_the_optimizer_and_its_state(mode):
    """One call of each hook a step, and a state that an equal optimizer takes."""
    calls = []
    run = Run(levers=LEVERS, mode=mode)
    run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run.step()
    assert calls == ["after"]
    plain = Run()
    plain.optimizer.load_state_dict(run.optimizer.state_dict())
    steps = {float(state["step"]) for state in plain.optimizer.state.values()}
    assert steps == {4.0}


@BOTH_MODES
def test_other_backward_passes_are_left_alone(mode):
    run = Run(levers=LEVERS, mode=mode)
    before = run.model.head.weight.detach().clone()
    run.loss().backward()  # Outside of ``apply``, or of what ``compile`` returned.
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


@BOTH_MODES
def test_a_parameter_that_is_read_after_its_gradient_waits(mode):
    """In eager mode for the optimizer's step, in graph mode for the last read."""
    runs = []
    for levers in (None, LEVERS):
        torch.manual_seed(0)
        module, x = ReadLate(), torch.linspace(0, 1, 16).view(2, 8)
        early = train(module, x, torch.optim.SGD(module.parameters(), lr=0.1), levers, mode)
        if levers is not None:
            assert any(one is module.high for one in early) == (mode == "graph")
            assert any(one is module.low for one in early)
        runs.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@BOTH_MODES
def test_two_parameters_in_one_storage_wait(mode):
    one = nn.Linear(8, 8, bias=False)
    other = nn.Linear(8, 8, bias=False)
    other.weight.data = one.weight.data
    optimizer = torch.optim.SGD([one.weight, other.weight], lr=0.1)
    x = torch.rand(2, 8)
    options = {"budget": "100%", "optimizer": optimizer, "levers": LEVERS}
    if mode == "graph":
        compiled = remat.torch.compile(lambda: other(one(x)).square().mean(), backend="aten", **options)
        compiled().backward()
        assert type(one.weight.grad) is torch.Tensor
        assert not compiled.plan.update.moved
    else:
        assert not remat.torch.plan(lambda: other(one(x)).square().mean(), **options).early


@pytest.mark.thorough
def test_smallest_peaks_with_slices_and_early_updates():
    """Each lever more makes the smallest peak no larger, the optimizer's step counted."""

    def trained(levers):
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True)
        head = nn.Linear(64, 4000)
        model = nn.Sequential(nn.Embedding(4000, 64), nn.TransformerEncoder(block, 2, enable_nested_tensor=False), head)
        optimizer = adam(model.parameters())
        words = torch.arange(256).remainder(97).view(2, 128)

        def loss():
            return F.cross_entropy(model(words).flatten(0, 1), words.flatten())

        run, plan = loss, None
        if levers is not None:
            options = {"backend": "aten", "levers": levers, "optimizer": optimizer, "planner": "peak_greedy"}
            with pytest.raises(remat.InfeasibleBudget) as error:
                remat.torch.compile(loss, budget=1, **options)()
            run = remat.torch.compile(loss, budget=error.value.minimum_bytes, **options)

        def step():
            run().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        peak_bytes = remat.torch.measure(step, repeats=1).peak_bytes
        if levers is not None:
            plan = run.plan
            assert plan.measured_peak_bytes <= 1.001 * plan.budget_bytes
            assert "update" not in levers or peak_bytes <= 1.001 * plan.budget_bytes
        return list(model.parameters()), peak_bytes, plan

    expected, plain_bytes, _ = trained(None)
    recomputed, recomputed_bytes, _ = trained(("recompute",))
    both, both_bytes, plan = trained(LEVERS)
    assert all(torch.equal(a, b) for a, b in zip(expected, recomputed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, both, strict=True))
    assert both_bytes <= 1.001 * recomputed_bytes < plain_bytes
    assert plan.update is not None

    split, split_bytes, plan = trained(("recompute", "split", "update"))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(expected, split, strict=True))
    assert plan.split is not None
    assert plan.update.moved > 0
    assert split_bytes < 0.7 * both_bytes


class Gated(nn.Module):
    """A gate made with ``high`` is read, to differentiate ``low``, after the gradient of ``high`` is there."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        gate = self.high(x).sigmoid().detach()
        for _ in range(3):
            x = torch.tanh(self.low(x) * gate)
        return self.high(x)


def mean_square(module, x):
    return module(x).square().mean()


def test_what_is_recomputed_never_reads_what_was_updated():
    runs = []
    for limited in (False, True):
        torch.manual_seed(0)
        module, x = Gated(), torch.linspace(-1, 1, 512 * 32).view(512, 32)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        options = {"optimizer": optimizer, "levers": LEVERS, "planner": "peak_greedy"}
        step = functools.partial(mean_square, module, x)
        if limited:
            step = remat.torch.compile(step, backend="aten", budget="90%", **options)
        for _ in range(2):
            step().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    plan = step.plan
    assert plan.recomputed > 0
    assert plan.update.moved == 3
    graph, updated = plan.graph, set()
    for op in plan.schedule:
        assert not updated & {graph.tensors[number].name for number in graph.ops[op].inputs}
        if graph.ops[op].kind == "update":
            updated.add(graph.ops[op].name.removeprefix("update of "))
    assert updated == {name for name, _ in module.named_parameters()}
    # The product that makes the gate, and the one at the end.
    (high,) = (number for number in graph.inputs if graph.tensors[number].name == "high.weight")
    of_high = [graph.ops[index] for index in graph.readers[high]]
    assert [op.recomputable for op in of_high if op.phase == "forward"] == [False, True]


@BOTH_MODES
def test_a_plan_from_a_file(tmp_path, mode):
    early = Run(levers=LEVERS, steps=int(mode == "graph"), mode=mode)
    early.plan.save(tmp_path / "plan.json", early.plan.graph)
    loaded, graph = load_plan_and_graph(tmp_path / "plan.json")
    beside = early.plan.peak_bytes - remat.simulate(graph, loaded.schedule).peak_bytes
    slots = [slot for state in early.optimizer.state.values() for slot in state.values()]
    unused_bytes = 2 * early.model.unused.nbytes + 4  # Its slots would be made, were it used.
    assert beside == (sum(slot.nbytes for slot in slots) + unused_bytes if mode == "graph" else 0)
    if mode == "graph":
        again = Run(levers=LEVERS, mode=mode, steps=0)
        again.compiled = remat.torch.compile(again.loss, backend="aten", plan=loaded, optimizer=again.optimizer)
        again.step()
        assert same(early, again)
    else:
        assert len(remat.torch.plan(early.loss, plan=loaded, optimizer=early.optimizer).early) == len(early.plan.early)
        again = Run(steps=0)
        again.applied = remat.torch.apply(remat.torch.plan(again.loss, plan=loaded, optimizer=again.optimizer))
    assert again.plan.peak_bytes == early.plan.peak_bytes
    assert again.plan.update == early.plan.update


@pytest.mark.parametrize("mode", ["eager", "graph", "auto"])
def test_a_function_that_returns_a_loss(mode):
    plain, early = Run(), Run()
    options = {"optimizer": early.optimizer, "levers": ("update",), "mode": mode}
    early.loss = remat.torch.limit_memory(early.loss, "100%", **options)
    plain.step()
    early.step()
    plain.step()
    early.step()
    assert same(plain, early)
    (plan,) = early.loss.plans
    assert plan.mode == ("eager" if mode == "eager" else "graph")
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.update.saved_bytes > 0


def test_a_function_that_cannot_be_captured_updates_early_in_eager_mode():
    plain, early = Run(), Run()
    whole = early.loss

    def broken():
        torch._dynamo.graph_break()
        return whole()

    early.loss = remat.torch.limit_memory(broken, "100%", optimizer=early.optimizer, levers=LEVERS)
    for _ in range(2):
        plain.step()
        early.step()
    assert same(plain, early)
    (plan,) = early.loss.plans
    assert plan.mode == "eager"
    assert plan.update.moved > 0


def test_a_hook_of_a_parameter_sees_its_gradient():
    runs, seen = [], []
    for levers in (None, LEVERS):
        run = Run(levers=levers, mode="graph", steps=0)
        run.model.head.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        run.step()
        runs.append(run)
    assert same(*runs)
    assert torch.equal(seen[0], seen[-1])  # Planning calls it as well.


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
            lambda f, o: remat.torch.compile(f, backend="aten", levers=LEVERS), "give optimizer=", id="none to capture"
        ),
        pytest.param(
            lambda f, o: remat.torch.compile(f, levers=LEVERS), 'levers= .*needs backend="aten"', id="Inductor"
        ),
        pytest.param(
            lambda f, o: remat.torch.limit_memory(f, mode="eager", levers=("split",)), "needs graph mode", id="eager"
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
