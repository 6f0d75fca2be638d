"""Steps that are traced for a GPU without one: which kernels PyTorch would choose there, and what they keep."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import remat
import remat.torch
from remat.torch.trace import gpu_attention, gpu_scratch
from remat.torch.trace.gpu_attention import AttentionCall, choose

A100, RTX3090, H100, B200, T4 = (8, 0), (8, 6), (9, 0), (10, 0), (7, 5)
BATCH, HEADS, LENGTH, SIZE = 2, 4, 128, 64


def call(
    capability=A100, dtype=torch.bfloat16, size=SIZE, heads=(HEADS, HEADS, HEADS), lengths=(LENGTH, LENGTH), **more
):
    shapes = [(BATCH, h, n, size) for h, n in zip(heads, (lengths[0], lengths[1], lengths[1]), strict=True)]
    made = AttentionCall(
        (dtype,) * 3,
        *shapes,
        mask=None,
        mask_is_differentiated=False,
        is_dense=True,
        dropout=0.0,
        is_causal=False,
        has_groups=False,
        is_differentiated=True,
        capability=capability,
    )
    return dataclasses.replace(made, **more)


@pytest.mark.parametrize(
    ("wanted", "made"),
    [
        # By GPU and dtype: cuDNN is preferred on Hopper and Blackwell; bfloat16 needs compute capability 8.
        ("flash", call()),
        ("cudnn", call(H100)),
        ("cudnn", call(B200)),
        ("efficient", call(dtype=torch.float32)),
        ("efficient", call(H100, dtype=torch.float32)),
        ("math", call(H100, dtype=torch.float64)),
        ("efficient", call(T4, dtype=torch.float16)),
        ("math", call(T4)),
        # A mask: flash attention has none, and cuDNN none that needs a gradient or has three axes.
        ("efficient", call(mask=(LENGTH, LENGTH))),
        ("cudnn", call(H100, mask=(BATCH, 1, LENGTH, LENGTH))),
        ("efficient", call(H100, mask=(BATCH, LENGTH, LENGTH))),
        ("efficient", call(H100, mask=(LENGTH, LENGTH), mask_is_differentiated=True)),
        ("math", call(mask=(LENGTH, 1), is_dense=False)),
        # The size of a head.
        ("flash", call(size=60)),
        ("flash", call(H100, size=60)),
        ("flash", call(H100, size=256)),
        ("flash", call(size=256)),
        ("efficient", call(size=264)),
        ("math", call(size=260)),
        ("efficient", call(dtype=torch.float32, size=260)),
        ("math", call(dtype=torch.float32, size=262)),
        ("efficient", call(RTX3090, size=200)),
        ("flash", call(RTX3090, size=200, is_differentiated=False)),
        ("flash", call(RTX3090, size=256)),
        ("efficient", call(RTX3090, size=256, dropout=0.1)),
        # Groups of heads: memory-efficient attention has none.
        ("flash", call(heads=(8, 2, 2), has_groups=True)),
        ("cudnn", call(H100, heads=(8, 2, 2), has_groups=True)),
        ("math", call(heads=(8, 2, 2), has_groups=True, mask=(LENGTH, LENGTH))),
        ("math", call(heads=(8, 2, 2))),
        ("cudnn", call(H100, heads=(8, 2, 4), has_groups=True)),
        ("math", call(heads=(8, 2, 4), has_groups=True)),
        # Causal, of two lengths; dropout, in sixteenths for cuDNN; one key.
        ("flash", call(is_causal=True)),
        ("efficient", call(is_causal=True, lengths=(64, 128))),
        ("cudnn", call(H100, is_causal=True, lengths=(64, 128))),
        ("cudnn", call(H100, dropout=0.125)),
        ("flash", call(H100, dropout=0.1)),
        ("flash", call(H100, lengths=(LENGTH, 1))),
        ("math", call(lengths=(LENGTH, 0))),
        ("flash", call(H100, is_deterministic=True)),
        # What a user has switched off.
        ("math", call(allowed=frozenset({"math"}))),
        ("cudnn", call(allowed=frozenset({"cudnn"}))),
        (None, call(dtype=torch.float32, allowed=frozenset({"flash"}))),
    ],
)
def test_the_kernel_that_pytorch_chooses(wanted, made, monkeypatch):
    monkeypatch.setattr(gpu_attention, "_IS_UP_TO_2_11", False)
    assert choose(made) == wanted


@pytest.mark.parametrize("made", [call(H100, size=256), call(H100, dropout=0.1)])
def test_up_to_pytorch_2_11_cudnn_takes_more(made, monkeypatch):
    """As an H200 did."""
    monkeypatch.setattr(gpu_attention, "_IS_UP_TO_2_11", True)
    assert choose(made) == "cudnn"
    assert choose(dataclasses.replace(made, capability=(8, 0))) == "flash"


class Block(torch.nn.Module):
    """Attention with groups of heads, RMS normalisation and dropout, as in a Llama."""

    def __init__(self, mask=None):
        super().__init__()
        width = HEADS * SIZE
        self.norm = torch.nn.RMSNorm(width)
        self.query, self.out = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.both = torch.nn.Linear(width, 2 * SIZE, bias=False)
        self.drop = torch.nn.Dropout(0.1)
        self.mask = mask

    def forward(self, x):
        def heads(y, count):
            return y.view(*y.shape[:2], count, SIZE).transpose(1, 2)

        y = self.norm(x)
        key, value = self.both(y).chunk(2, -1)
        groups = {"enable_gqa": True} if self.mask is None else {}
        count = 1 if self.mask is None else HEADS
        key, value = (heads(t.repeat(1, 1, count), count).contiguous() for t in (key, value))
        query = heads(self.query(y), HEADS)
        y = F.scaled_dot_product_attention(query, key, value, self.mask, is_causal=self.mask is None, **groups)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


def step(device="meta", dtype=torch.bfloat16, **options):
    with torch.device(device):
        block = Block(**options).to(dtype)
        x = torch.zeros(BATCH, LENGTH, HEADS * SIZE, dtype=dtype)
    return block, lambda x: block(x).square().mean(), x


def kinds(graph):
    return [op.kind for op in graph.ops]


def sizes(graph, kind):
    (op,) = (op for op in graph.ops if op.kind == kind)
    return [graph.tensors[t].size_bytes for t in op.outputs], op


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("gpu", "kernel"), [("a100", "flash"), ("h100", "cudnn")])
def test_a_step_for_a_gpu_keeps_what_its_kernels_keep(gpu, kernel, device):
    block, loss, x = step(device)
    before = [p.clone() for p in block.parameters()] if device == "cpu" else []
    graph = remat.torch.trace(loss, x, device=gpu)

    made, forward = sizes(graph, f"_scaled_dot_product_{kernel}_attention")
    rows = BATCH * HEADS * LENGTH
    assert made[:2] == [2 * rows * SIZE, 4 * rows]  # The result, and a number in float32 for each row,
    assert sum(made[2:]) <= 64  # and the seeds.
    assert forward.recomputable  # Without dropout it draws nothing.
    _, backward = sizes(graph, f"_scaled_dot_product_{kernel}_attention_backward")
    gradients_of_groups = 2 * (2 * rows * SIZE)
    assert backward.workspace_bytes == 4 * rows * (SIZE + 1) + gradients_of_groups
    assert sizes(graph, "native_dropout")[0] == [2 * x.numel(), x.numel()]  # A mask of one byte each.
    assert sizes(graph, "native_dropout")[1].recomputable
    assert sizes(graph, "_fused_rms_norm")[0] == [2 * x.numel(), 4 * BATCH * LENGTH]
    assert "bmm" not in kinds(graph)
    products = [torch.ops.aten.mm.default]
    workspaces_bytes = gpu_scratch.cublas_bytes(products, (9, 0) if gpu == "h100" else (8, 0))
    assert sorted(t.size_bytes for t in graph.tensors)[-1] == workspaces_bytes
    assert sorted(t.size_bytes for t in graph.tensors)[-2] <= 4 * x.numel()
    assert any(note.startswith("the kernels are those that PyTorch") and gpu in note for note in graph.notes)
    assert any("cuDNN is 9.15.1" in note for note in graph.notes) == (kernel == "cudnn")
    assert all(torch.equal(p, q) for p, q in zip(block.parameters(), before, strict=False))
    # Afterwards everything is as it was.
    here = remat.torch.trace(loss, x)
    assert here.notes == ()
    assert not any("cudnn" in kind or "fused" in kind or "dropout" in kind for kind in kinds(here))


def test_a_mask_of_truth_values_is_added_in_rows_of_eight():
    block, loss, x = step()
    block.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta")
    graph = remat.torch.trace(loss, x, device="a100")
    assert "_scaled_dot_product_efficient_attention" in kinds(graph)
    assert kinds(graph).count("constant_pad_nd") == 0
    assert [t.shape for t in graph.tensors if t.dtype == "bfloat16"].count((LENGTH, LENGTH)) == 1

    odd = x[:, :125]
    block.mask = torch.ones(125, 125, dtype=torch.bool, device="meta")
    padded = remat.torch.trace(loss, odd, device="a100")
    assert kinds(padded).count("constant_pad_nd") == 1
    assert (125, 128) in [t.shape for t in padded.tensors]


def test_what_a_user_allows_is_what_runs():
    _, loss, x = step()
    with sdpa_kernel(SDPBackend.MATH):
        assert kinds(remat.torch.trace(loss, x, device="h100")).count("bmm") == 6
    _, loss, x = step(dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(remat.UnsupportedStep, match="sdpa_kernel allows"):
        remat.torch.trace(loss, x, device="h100")


def test_autocast_decides_before_the_kernel_is_chosen():
    _, loss, x = step("cpu", torch.float32)

    def lower(x):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(x)

    assert "_scaled_dot_product_flash_attention" in kinds(remat.torch.trace(lower, x, device="a100"))
    assert "_scaled_dot_product_flash_attention" not in kinds(remat.torch.trace(loss, x, device="a100"))


def test_other_names_for_attention_and_dropout():
    x = torch.zeros(BATCH, HEADS, LENGTH, SIZE, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def loss(x):
        y = torch.ops.aten.scaled_dot_product_attention(x, x, x)
        y = y + torch._C._nn.scaled_dot_product_attention(x, x, x)
        return torch.dropout(torch.ops.aten.dropout(y, 0.1, True), 0.1, True).mean()

    found = kinds(remat.torch.trace(loss, x, device="a100"))
    assert found.count("_scaled_dot_product_flash_attention") == 2
    assert found.count("native_dropout") == 2


def test_pytorchs_own_attention_layer():
    layer = torch.nn.MultiheadAttention(HEADS * SIZE, HEADS, dropout=0.1, batch_first=True, device="meta").bfloat16()
    x = torch.zeros(BATCH, LENGTH, HEADS * SIZE, dtype=torch.bfloat16, device="meta")
    graph = remat.torch.trace(lambda x: layer(x, x, x, need_weights=False)[0].mean(), x, device="a100")
    _, attention = sizes(graph, "_scaled_dot_product_flash_attention")
    assert attention.recomputable  # Though it draws: from a generator that can be put back.


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_updates_all_parameters_at_once(optimizer):
    block, loss, x = step()
    made = optimizer(block.parameters(), lr=1e-3)
    graph = remat.torch.trace(loss, x, optimizer=made, device="a100")
    update = [op.kind for op in graph.ops if op.phase == "update"]
    assert update
    assert all(kind.startswith("_foreach") for kind in update)
    assert all(group["foreach"] is None for group in made.param_groups)
    assert any("foreach" in note for note in graph.notes)
    one_by_one = optimizer(block.parameters(), lr=1e-3, foreach=False)
    graph = remat.torch.trace(loss, x, optimizer=one_by_one, device="a100")
    assert not any(kind.startswith("_foreach") for kind in kinds(graph))


def test_a_fused_optimizer_stays_one():
    block, loss, x = step("cpu", torch.float32)
    made = torch.optim.AdamW(block.parameters(), fused=True)
    graph = remat.torch.trace(loss, x, optimizer=made, device="a100")
    # Beside it only the step counts move.
    assert [op.kind for op in graph.ops if op.phase == "update" and op.outputs] == ["_fused_adamw_"]


def test_a_grouped_product_is_one_operator():
    experts = torch.zeros(4, 64, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    x = torch.zeros(128, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    graph = remat.torch.trace(lambda x: torch._grouped_mm(x, experts, offs=ends).mean(), x, device="h100")
    assert kinds(graph).count("_grouped_mm") == 2  # Forward, and the gradient of the experts.


def test_what_is_not_known_is_said():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to("meta")
    x = torch.zeros(2, 3, 8, 8, device="meta")
    notes = remat.torch.trace(lambda x: model(x).mean(), x, device="a100").notes
    assert any("cuDNN's convolutions" in note for note in notes)
    assert any("batch normalisation" in note for note in notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast for CUDA is what runs on this machine")
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_that_switches_itself_off_is_said(enabled):
    weight = torch.zeros(8, 8, device="meta", requires_grad=True)

    def loss(x):
        with torch.autocast("cuda", torch.bfloat16, enabled):
            return (x @ weight).mean()

    notes = remat.torch.trace(loss, torch.zeros(4, 8, device="meta"), device="h100").notes
    assert any("autocast" in note for note in notes) == enabled


def test_a_plan_for_a_gpu_is_made_of_a_step_on_the_meta_device():
    _, loss, x = step()
    # What cuBLAS keeps is most of so small a step.
    planned = remat.torch.plan(loss, x, budget="1GiB", planner="peak_greedy", device="a100")
    assert "_scaled_dot_product_flash_attention" in kinds(planned.graph)
    # A step that can run here is planned for what runs here.
    _, loss, x = step("cpu")
    planned = remat.torch.plan(loss, x, budget="99%", planner="peak_greedy", device="a100")
    assert "_scaled_dot_product_flash_attention" not in kinds(planned.graph)


def test_a_batch_beside_the_model_gets_one_line():
    _, loss, x = step()
    wanted = r"of shape \(2, 128, 256\) on cpu.*torch.empty\(2, 128, 256, dtype=torch.bfloat16, device='meta'\)"
    with pytest.raises(remat.UnsupportedStep, match=wanted):
        remat.torch.trace(loss, torch.zeros(x.shape, dtype=x.dtype))
