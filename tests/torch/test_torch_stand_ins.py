"""The traced step is the step that runs: no code of a library can tell a stand-in from a real tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import remat
import remat.torch
from remat.torch import _private
from remat.torch.trace import late_values
from remat.torch.trace.fake_step import record_step


class Operators(_private.TorchDispatchMode):
    """The operators of a real step that make or write a storage."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in _private.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        made = [t for t in _private.tree_leaves(out) if torch.is_tensor(t)]
        if _private.is_mutable(func) or any(t.untyped_storage()._cdata not in inputs for t in made):
            self.seen.append((func, [tuple(t.shape) for t in made]))
        return out


def assert_traced_as_run(loss_fn, *args):
    """The forward pass of the trace has the operators of a real one, with the same shapes."""
    recording = record_step(loss_fn, args)
    with Operators() as real:
        loss_fn(*args)
    traced = recording.ops[: recording.forward_ops]
    assert [op.func for op in traced] == [func for func, _ in real.seen]
    for op, (_, shapes) in zip(traced, real.seen, strict=True):
        assert {recording.storages[number].shape for number in op.makes} <= set(shapes)
    return recording


DETECTORS = {
    "type": lambda x: type(x) is not torch.Tensor,
    "isinstance": lambda x: isinstance(x, FakeTensor),
    "subclass": lambda x: type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__,
    "fake mode": lambda x: detect_fake_mode([x]) is not None,
    "modes": lambda x: any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()),
    "compiling": lambda x: torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None,
    "device": lambda x: x.device.type != "cpu" or x.is_meta,
    "module": lambda x: type(x).__module__ != "torch",
    "storage": lambda x: x.untyped_storage().nbytes() != 4 * x.numel() or x.untyped_storage().device.type != "cpu",
    "name": lambda x: "Fake" in type(x).__name__ or "fake" in str(type(x)),
}


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_library_cannot_tell(detector):
    notices, layer = DETECTORS[detector], nn.Linear(8, 8)

    def loss(x):
        y = layer(x)
        return (y.exp() if notices(y) else y.tanh()).sum()

    assert_traced_as_run(loss, torch.randn(4, 8))
    assert any(op.kind == "tanh" for op in remat.torch.trace(loss, torch.randn(4, 8)).ops)


def test_values_follow_from_constants_and_from_the_batch():
    layer = nn.Linear(200, 200)

    def loss(x, mask):
        positions = torch.arange(200).expand(100, -1)
        causal = positions[0][:, None] >= positions[0][None, :]
        assert causal.any()
        assert causal.sum().item() == 20100
        assert torch.zeros_like(x[:2]).tolist()[0] == [0.0] * 200
        assert torch.full((3,), 2.0).numpy().sum() == 6
        rows = torch.nonzero(mask[:, 0])
        y = layer(x[rows[:, 0]])
        return (y if torch.all(mask == 1) else y.tanh()).sum()

    full = torch.ones(100, 200, dtype=torch.long)
    padded = full.clone()
    padded[3] = 0
    for mask, wanted in ((full, False), (padded, True)):
        assert_traced_as_run(loss, torch.randn(100, 200), mask)
        kinds = [op.kind for op in remat.torch.trace(loss, torch.randn(100, 200), mask).ops]
        assert ("tanh" in kinds) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [((12, 16), (3, 16, 8)), ((16, 8), (8, 16)), ((3, 4, 16), (3, 16, 8))])
def test_a_product_over_groups_is_traced_in_every_dtype(dtype, left, right):
    """PyTorch's own shape rule takes bfloat16 alone; the kernel for CPUs takes more."""
    ends = None if len(left) == len(right) == 3 else torch.tensor([2, 5, left[-2] if len(right) == 3 else left[-1]])
    ends = ends if ends is None else ends.int()
    a, b = (torch.randn(shape).to(dtype).requires_grad_() for shape in (left, right))
    assert_traced_as_run(lambda a, b: torch._grouped_mm(a, b, offs=ends).float().square().mean(), a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_mixed_experts_keep_a_budget_in_every_dtype(mode, dtype, caplog):
    """Experts as libraries write them: gate and up in one grouped product, then down in another."""
    torch.manual_seed(0)
    up, down = (torch.randn(shape).mul(0.1).to(dtype).requires_grad_() for shape in ((4, 64, 256), (4, 256, 64)))
    x, ends = torch.randn(512, 64).to(dtype), torch.tensor([100, 260, 300, 512], dtype=torch.int32)

    def loss_fn(x):
        for _ in range(4):
            x = x + torch._grouped_mm(nn.functional.silu(torch._grouped_mm(x, up, offs=ends)), down, offs=ends)
        return x.float().square().mean()

    loss_fn(x).backward()
    wanted = [weight.grad.clone() for weight in (up, down)]
    up.grad = down.grad = None
    limited = remat.torch.limit_memory(loss_fn, "60%", mode=mode)
    limited(x).backward()
    (plan,) = limited.plans
    assert plan.mode == mode
    assert not [one for one in caplog.records if one.name == "remat"]  # Nothing was captured as for a compiler.
    assert plan.recomputed > 0
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert [torch.equal(weight.grad, one) for weight, one in zip((up, down), wanted, strict=True)] == [True, True]


def test_a_ctc_loss_is_as_wide_as_its_longest_target():
    layer = nn.Linear(8, 20)
    labels = torch.tensor([[3, 4, 5, -100], [7, 8, 9, 1]])

    def loss(x, labels):
        log_probabilities = layer(x).log_softmax(-1).transpose(0, 1)
        is_label = labels >= 0
        lengths = torch.full((2,), 12), is_label.sum(-1)
        return nn.functional.ctc_loss(log_probabilities, labels.masked_select(is_label), *lengths)

    assert_traced_as_run(loss, torch.randn(2, 12, 8), labels)
    graph = remat.torch.trace(loss, torch.randn(2, 12, 8), labels)
    (table,) = [t for t in graph.tensors if t.shape == (2, 12, 9)]
    assert table.size_bytes == 4 * 2 * 12 * 9
    assert any(op.kind.startswith("_ctc_loss_backward") for op in graph.ops)


def test_an_index_that_autograd_saves_is_known_in_the_backward_pass():
    layer, filling = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def loss(x, mask):
        y = layer(x)
        y[~mask] = filling
        return y[mask.transpose(0, 1).contiguous().transpose(0, 1)].square().sum() + y.square().sum()

    mask = torch.rand(4, 6) > 0.5
    assert_traced_as_run(loss, torch.randn(4, 6, 8), mask)
    graph = remat.torch.trace(loss, torch.randn(4, 6, 8), mask)
    assert any(op.phase == "backward" and op.kind.startswith("index") for op in graph.ops)


def test_what_the_step_writes_is_known_and_what_it_was_given_stays():
    count, mask = torch.tensor([1, 2]), torch.zeros(3, dtype=torch.bool)

    def loss(x):
        count.add_(1)
        count[0] = 7
        assert count.tolist() == [7, 3]
        assert count.detach()[0].item() == 7
        mask.logical_not_()
        return x.sum() * 2 if bool(mask.all()) else x.sum()

    graph = remat.torch.trace(loss, torch.randn(3, requires_grad=True))
    assert any(op.kind.startswith("mul") for op in graph.ops)
    assert count.tolist() == [1, 2]
    assert not mask.any()


def wide_mask(mask, hidden):
    """What a library makes of a mask of tokens: numbers to add, for each pair of tokens; more than are followed."""
    pairs = mask[:, None, None, :].logical_and(mask[:, None, :, None])
    added = torch.where(pairs, torch.tensor(0.0), torch.tensor(float("-inf"))).expand(-1, 1, -1, -1).clone()
    added[:, 0, 0, :][hidden] = 5.0  # Written in place, to a part of it, by another mask.
    return added[:, 0, 0]


@pytest.mark.parametrize("hides", [False, True])
def test_a_truth_value_by_way_of_a_large_tensor_is_known(hides):
    layer, mask = nn.Linear(8, 8), torch.ones(2, 200, dtype=torch.bool)
    hidden = torch.zeros_like(mask)
    hidden[1, 150:] = hides

    def loss(x, mask, hidden):
        found = wide_mask(mask, hidden) > 0
        y = layer(x)
        if not found.any():
            return y.tanh().sum()
        found.logical_not_()
        return (y.exp()[~found].sum() + y[(~found).nonzero(as_tuple=True)].sum()).sin()

    recording = assert_traced_as_run(loss, torch.randn(2, 200, 8), mask, hidden)
    assert mask.all()
    # What is noted for later holds no tensor of the step.
    made = [s for s in recording.storages if s.shape is not None and s.shape[-2:] == (200, 200)]
    assert {s.dtype for s in made} == {"bool", "float32"}
    assert all(s.released < recording.forward_ops for s in made)


def test_a_truth_value_of_a_large_batch_is_known():
    layer = nn.Linear(8, 8)

    def loss(x):
        x[0] = 0.5
        return (layer(x * 2).exp() if (x.abs() > 3.5).any() else layer(x * 2).tanh()).sum()

    for largest, row in ((1.0, 1), (4.0, 0), (4.0, 5000)):
        x = torch.full((10_000, 8), 1.0)
        x[row, 3] = largest
        record_step(loss, (x,))
        assert x[row, 3] == largest
        assert (x == 1).sum() >= 10_000 * 8 - 1
        assert_traced_as_run(loss, x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_truth_value_of_large_constants_is_known(device):
    layer = nn.Linear(8, 8, device=device)

    def loss(x):
        places = -torch.arange(1100, device=x.device)
        numbers = torch.zeros(1100, 1100, device=x.device).masked_fill_(places[:, None] > places, -1)
        places.neg_()  # Between two reads of what is large.
        numbers.masked_fill_(places[:, None] >= places, 1)
        y = layer(x)
        return (y.exp() if numbers.tril().sum() == 1100 * 1101 / 2 else y.tanh()).sum()

    recording = record_step(loss, (torch.ones(2, 8, device=device),))
    assert any(op.name.endswith("exp") for op in recording.ops)


def test_what_takes_too_much_work_is_not_computed(monkeypatch):
    monkeypatch.setattr(late_values, "_MOST_BYTES", 1 << 10)
    layer = nn.Linear(8, 8)

    def loss(x):
        return (layer(x).exp() if (x.abs() > 3.5).any() else layer(x).tanh()).sum()

    recording = record_step(loss, (torch.full((10_000, 8), 4.0),))
    assert any(op.name.endswith("tanh") for op in recording.ops)


def test_a_truth_value_that_nobody_knows_is_no():
    layer = nn.Linear(8, 8)

    def loss(x):
        y = layer(x)
        return (y.exp() if y.isnan().any() else y.tanh()).sum()

    assert_traced_as_run(loss, torch.randn(4, 8))


def test_a_truth_value_that_must_be_yes_is_yes():
    layer = nn.Linear(8, 8)

    def loss(x):
        y = layer(x)
        assert y.isfinite().all()
        return y.tanh().sum()

    assert_traced_as_run(loss, torch.randn(4, 8))


def chosen(layer, classes=8, one_hot=nn.functional.one_hot):
    """Experts that a step picks by value: PyTorch's ``one_hot`` looks at the values of what it is given.

    A default is bound before any trace begins, as a name is that a module imports.
    """

    def loss(x):
        y = layer(x)
        shares, experts = y.softmax(-1).topk(2)
        picked = one_hot(experts, classes)
        return ((picked * shares[..., None]).sum(1) * y).tanh().sum()

    return loss


def test_classes_that_one_hot_looks_at_are_taken_as_they_come():
    assert_traced_as_run(chosen(nn.Linear(8, 8)), torch.randn(4, 8))


def test_classes_that_are_not_there_are_an_error_of_the_real_step():
    layer, x = nn.Linear(8, 8), torch.randn(64, 8)

    def loss(x):
        y = layer(x)
        return (nn.functional.one_hot(y.argmax(-1), 2).sum(1, keepdim=True) * y).sum()

    plan = remat.torch.plan(loss, x, budget="100%")
    with remat.torch.apply(plan), pytest.raises(RuntimeError, match="smaller than num_classes"):
        loss(x)


def test_how_many_classes_there_are_is_not_made_up():
    with pytest.raises(remat.UnsupportedStep, match="without values"):
        remat.torch.trace(chosen(nn.Linear(8, 8), classes=-1), torch.randn(4, 8))


@pytest.mark.parametrize(
    "read", [lambda y: y.tolist(), lambda y: y.detach().numpy(), lambda y: y.data_ptr(), lambda y: y.sum().item()]
)
def test_numbers_that_nobody_knows_are_refused(read):
    layer = nn.Linear(8, 8)

    def loss(x):
        y = layer(x)
        read(y)
        return y.sum()

    with pytest.raises(remat.UnsupportedStep, match="without values"):
        remat.torch.trace(loss, torch.randn(4, 8))


def test_what_is_left_behind_holds_no_numbers():
    kept, layer = [], nn.Linear(3, 3)

    def loss(x):
        y = layer(x)
        kept.extend((y, y.detach()[1:], (y > 0).long()))
        return y.sum()

    remat.torch.trace(loss, torch.randn(2, 3))
    assert kept[0].isnan().all()
    assert kept[1].isnan().all()
    assert kept[1].shape == (1, 3)
    assert (kept[2] < 0).all()
    assert "nan" in repr(kept[0])


LIBRARY_MODELS = {
    "BertForMaskedLM": ("BertConfig", {"intermediate_size": 64}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {"intermediate_size": 64}),
    "LlamaForCausalLM": ("LlamaConfig", {"intermediate_size": 64, "num_key_value_heads": 2}),
}


@pytest.mark.parametrize(("name", "padded"), [(name, False) for name in LIBRARY_MODELS] + [("LlamaForCausalLM", True)])
def test_models_of_a_library(name, padded):
    transformers = pytest.importorskip("transformers", reason="transformers is in requirements-dev.txt")
    config, more = LIBRARY_MODELS[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **more)).train()
    ids = torch.randint(3, 49, (4, 72))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 60:] = 0
    assert_traced_as_run(lambda ids, mask: model(input_ids=ids, labels=ids, attention_mask=mask).loss, ids, mask)
