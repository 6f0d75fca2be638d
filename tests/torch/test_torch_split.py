"""The lever "split" in graph mode: the head in slices, equal to eager PyTorch to rounding, memory as predicted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
import remat.torch
from remat.core.plan import load_plan_and_graph

pytestmark = pytest.mark.usefixtures("no_compiled_code")

WORDS, WIDTH, ROWS = 6000, 16, 128
LEVERS = ("recompute", "split")


class Language(nn.Module):
    """An embedding, one layer, and a head that has the embedding's weights."""

    def __init__(self, words=WORDS, bias=False, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(words, WIDTH)
        self.layer = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, words, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + self.layer(hidden))


def mean_loss(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def summed_loss(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / tokens.numel()


def masked_loss(model, tokens, labels):
    """A mask and a mean of one's own."""
    each = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    mask = (labels.flatten() >= 0).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def sequence_loss(model, tokens, labels):
    """Words on the second axis, as PyTorch wants them of sequences."""
    return F.cross_entropy(model(tokens).transpose(1, 2), labels)


def shifted_loss(model, tokens, labels):
    """As libraries write it: all logits but the last, in full precision."""
    logits = model(tokens).float()[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels[:, 1:].flatten())


def scaled_loss(model, tokens, labels):
    """The head's loss with a second one beside it."""
    logits = model(tokens)
    return 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * model.head.weight.square().mean()


def clipped_loss(model, tokens, labels):
    """The gradient of the logits is cut off, which is not linear."""
    logits = model(tokens)
    logits.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def data(rows=ROWS):
    torch.manual_seed(1)
    tokens = torch.randint(0, WORDS, (4, rows // 4))
    labels = torch.randint(0, WORDS, (4, rows // 4))
    labels[0, :5] = -100
    return tokens, labels


def gradients(loss_fn, model, *args, factor=1.0):
    model.zero_grad()
    loss = loss_fn(model, *args)
    (loss * factor).backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def compiled(loss_fn, budget="45%", levers=LEVERS, **options):
    return remat.torch.compile(loss_fn, budget=budget, backend="aten", levers=levers, planner="peak_greedy", **options)


@pytest.mark.parametrize(
    ("loss_fn", "factor"),
    [
        (mean_loss, 3.0),
        *(
            pytest.param(loss_fn, factor, marks=pytest.mark.thorough)
            for loss_fn in (summed_loss, masked_loss, sequence_loss, shifted_loss, scaled_loss)
            for factor in (1.0, 3.0)
        ),
    ],
)
def test_losses_are_equal_to_rounding(loss_fn, factor):
    model, args = Language(), data()
    expected = gradients(loss_fn, model, *args, factor=factor)
    planned = compiled(loss_fn)
    found = gradients(planned, model, *args, factor=factor)
    assert planned.plan.split is not None
    assert planned.plan.measured_peak_bytes == planned.plan.peak_bytes
    assert planned.plan.peak_bytes <= 0.45 * planned.plan.baseline_peak_bytes
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-7, msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("bias", [False, True], ids=["tied", "bias"])
def test_five_steps_of_an_optimizer(bias):
    outcomes = []
    for loss_fn in (mean_loss, compiled(mean_loss)):
        model, args = Language(bias=bias, tied=not bias), data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            loss_fn(model, *args).backward()
            optimizer.step()
        outcomes.append([p.detach() for p in model.parameters()])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_the_smallest_peak_is_far_below_that_of_recomputation():
    model, args = Language(), data()
    smallest = {}
    for levers in (("recompute",), LEVERS):
        with pytest.raises(remat.InfeasibleBudget) as caught:
            compiled(mean_loss, budget=1000, levers=levers)(model, *args)
        smallest[levers] = caught.value.minimum_bytes
    assert smallest[LEVERS] < 0.65 * smallest["recompute",]
    torch._dynamo.reset()
    planned = compiled(mean_loss, budget=smallest[LEVERS])
    planned(model, *args).backward()
    assert planned.plan.measured_peak_bytes <= smallest[LEVERS]


@pytest.mark.thorough
def test_recomputation_alone_is_the_default():
    model, args = Language(), data()
    with pytest.raises(remat.InfeasibleBudget):
        compiled(mean_loss, levers=("recompute",))(model, *args)
    torch._dynamo.reset()
    planned = remat.torch.compile(mean_loss, budget="100%", backend="aten")
    planned(model, *args).backward()
    assert planned.plan.split is None


@pytest.mark.thorough
def test_a_split_alone_recomputes_nothing():
    model, args = Language(), data()
    planned = compiled(mean_loss, levers=("split",))
    planned(model, *args).backward()
    assert planned.plan.split is not None
    assert planned.plan.recomputed == 0


@pytest.mark.thorough
def test_a_gradient_that_is_no_multiple_of_the_loss_is_not_split():
    """The slices would compute with another incoming gradient than the real one."""
    model, args = Language(), data()
    expected = gradients(clipped_loss, model, *args)
    planned = compiled(clipped_loss, budget="90%")
    try:
        found = gradients(planned, model, *args)
    except remat.InfeasibleBudget as error:
        torch._dynamo.reset()
        planned = compiled(clipped_loss, budget=error.minimum_bytes)
        found = gradients(planned, model, *args)
    assert planned.plan.split is None or planned.plan.split.inner
    assert "nll_loss_forward_slice" not in planned.plan.forward_source
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-7, msg=name)


@pytest.mark.thorough
def test_sums_over_slices_of_bfloat16_are_made_in_float32():
    model, args = Language().bfloat16(), data(512)
    reference = gradients(mean_loss, Language().bfloat16().float(), *args)
    plain = gradients(mean_loss, model, *args)
    planned = compiled(mean_loss)
    found = gradients(planned, model, *args)
    assert planned.plan.split.slices >= 2
    for name, value in reference.items():
        assert found[name].dtype == plain[name].dtype
        error = (found[name].float() - value).norm() / value.norm()
        error_of_plain = (plain[name].float() - value).norm() / value.norm()
        assert error <= 1.1 * error_of_plain + 1e-6, name


def test_the_plan_says_what_was_split_and_is_replayed_without_pytorch(tmp_path):
    model, args = Language(), data()
    planned = compiled(mean_loss)
    planned(model, *args).backward()
    plan = planned.plan
    assert f"in {plan.split.slices} slices" in str(plan)
    plan.save(tmp_path / "plan.json", plan.graph)
    loaded, graph = load_plan_and_graph(tmp_path / "plan.json")
    assert loaded.split == plan.split
    assert remat.simulate(graph, loaded.schedule).peak_bytes == plan.peak_bytes
    names = {graph.ops[op].name for op, _ in plan.split.stands_for}
    assert {name.rpartition("_slice")[2] for name in names} == {str(n) for n in range(plan.split.slices)}

    torch._dynamo.reset()
    followed = remat.torch.compile(mean_loss, plan=loaded, backend="aten")
    found = gradients(followed, model, *args)
    for name, value in gradients(mean_loss, model, *args).items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-7, msg=name)


@pytest.mark.thorough
def test_half_precision_waits_for_its_scaled_gradient():
    """With 1 in place of a scaler's factor, gradients of float16 would vanish."""
    model, args = Language().half(), data()
    with pytest.raises(remat.InfeasibleBudget):
        compiled(mean_loss, levers=("split",))(model, *args)


@pytest.mark.thorough
def test_two_backward_passes_of_one_forward_pass():
    """The first must not write over what the slices left for the second."""
    model, args = Language(), data()
    expected = gradients(mean_loss, model, *args, factor=5.0)
    model.zero_grad()
    planned = compiled(mean_loss)
    loss = planned(model, *args)
    (loss * 2).backward(retain_graph=True)
    (loss * 3).backward()
    assert planned.plan.split is not None
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=2e-5, atol=1e-7, msg=name)


@pytest.mark.thorough
def test_a_plan_of_another_step_is_refused():
    model, args = Language(), data()
    planned = compiled(mean_loss)
    planned(model, *args).backward()
    torch._dynamo.reset()
    with pytest.raises(remat.PlanMismatch):
        remat.torch.compile(summed_loss, plan=planned.plan, backend="aten")(model, *args)


@pytest.mark.thorough
def test_a_step_over_its_budget_is_planned_again_with_more_slices():
    """What the first step took more counts as there before it."""
    model, args = Language(), data()
    planned = compiled(mean_loss)
    planned(model, *args).backward()
    first = planned.plan
    (captured,) = planned._captured.values()
    captured._over_budget(first, first.budget_bytes // 10)
    planned(model, *args).backward()
    assert planned.plan is not first
    assert planned.plan.split.slices >= first.split.slices
    assert planned.plan.measured_peak_bytes <= 0.95 * first.budget_bytes


@pytest.mark.parametrize("levers", ["split", (), ("micro_batches",)])
def test_unknown_levers_are_refused(levers):
    with pytest.raises(ValueError, match="levers="):
        remat.torch.compile(mean_loss, backend="aten", levers=levers)


def test_inductor_cannot_split():
    with pytest.raises(ValueError, match="levers= of remat"):
        remat.torch.compile(mean_loss, levers=LEVERS)


class InnerLayer(nn.Module):
    """An MLP whose inner layer is eight times as wide as what is around it, and something that mixes tokens."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 8 * width)
        self.down = nn.Linear(8 * width, width)

    def forward(self, x):
        x = x + self.norm(x).cumsum(1) / x.shape[1]
        return x + self.down(F.gelu(self.up(x)))


def inner_layers(layers=3):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(InnerLayer() for _ in range(layers))), torch.randn(2, 256, 32)
    return model, x, lambda model, x: model(x).square().mean()


def test_inner_layers_run_in_slices_where_recomputation_does_not_do():
    model, x, loss_fn = inner_layers()
    with pytest.raises(remat.InfeasibleBudget) as caught:
        compiled(loss_fn, 1, ("recompute",))(model, x)
    least_bytes = caught.value.minimum_bytes
    expected = gradients(loss_fn, model, x)

    planned = compiled(loss_fn, int(0.8 * least_bytes))
    found = gradients(planned, model, x)
    assert planned.plan.split.inner
    assert "inner layers" in str(planned.plan)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    assert remat.torch.measure(planned, model, x, repeats=1).peak_bytes <= planned.plan.budget_bytes

    # Where recomputation alone keeps a budget, nothing is computed in slices twice.
    roomy = compiled(loss_fn, int(1.05 * least_bytes))
    roomy(model, x)
    assert roomy.plan.split is None or not roomy.plan.split.inner
