"""Scratch memory that no formula knows: calls are tried once, and what is never tried takes none."""

from __future__ import annotations

import pytest
import torch
from tests.torch.test_torch_cpu_scratch import measured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import remat.torch
from remat.torch import _private
from remat.torch.trace import cpu_scratch, cpu_trials, lone_calls

ATEN = torch.ops.aten
LAST = torch.channels_last
HALF = torch.bfloat16
ROWS, COLUMNS = 256, 768


def calls(matrix, images):
    """A call of each operator of which is said that it takes no scratch memory, by names."""
    vector, rows = matrix[0].contiguous(), torch.randint(0, ROWS, (512,))
    columns = torch.randint(0, COLUMNS, (ROWS, COLUMNS))
    classes, pixels = torch.randint(0, COLUMNS, (ROWS,)), torch.randint(0, 16, (4, 32, 32))
    total, total_of_images = (torch.tensor(float(n), dtype=matrix.dtype) for n in (ROWS, pixels.numel()))
    one = matrix.new_ones(())
    size = [ROWS, COLUMNS]
    kind = {"dtype": matrix.dtype}
    return {
        "mv": (ATEN.mv.default, matrix, vector),
        "addmv": (ATEN.addmv.default, matrix.new_ones(ROWS), matrix, vector),
        "dot": (ATEN.dot.default, vector, vector),
        "addmm_": (ATEN.addmm_.default, matrix.new_zeros(ROWS, ROWS), matrix, matrix.t()),
        "sum": (ATEN.sum.dim_IntList, images, [0, 2, 3]),
        "mean": (ATEN.mean.dim, images, [2, 3]),
        "amax": (ATEN.amax.default, images, [2, 3]),
        "amin": (ATEN.amin.default, images, [1]),
        "max": (ATEN.max.dim, matrix, 1),
        "min": (ATEN.min.dim, matrix, 0),
        "argmax": (ATEN.argmax.default, matrix, 1),
        "any": (ATEN.any.dim, matrix > 0, 1),
        "all": (ATEN.all.dim, matrix > 0, 0),
        "var": (ATEN.var.correction, images, [0, 2, 3]),
        "var_mean": (ATEN.var_mean.correction, matrix, [1]),
        "std": (ATEN.std.correction, matrix, [0]),
        "prod": (ATEN.prod.dim_int, matrix, 1),
        "linalg_vector_norm": (ATEN.linalg_vector_norm.default, matrix, 2, [1]),
        "cumsum": (ATEN.cumsum.default, matrix, 1),
        "cumsum_": (ATEN.cumsum_.default, matrix.clone(), 0),
        "clone": (ATEN.clone.default, matrix),
        "copy_": (ATEN.copy_.default, matrix.new_empty(size), matrix),
        "_to_copy": (ATEN._to_copy.default, matrix),
        "cat": (ATEN.cat.default, [images, images], 1),
        "stack": (ATEN.stack.default, [images, images], 1),
        "repeat": (ATEN.repeat.default, matrix, [2, 2]),
        "constant_pad_nd": (ATEN.constant_pad_nd.default, images, [1, 1, 1, 1]),
        "flip": (ATEN.flip.default, images, [2, 3]),
        "tril": (ATEN.tril.default, matrix),
        "triu": (ATEN.triu.default, matrix),
        "slice_backward": (ATEN.slice_backward.default, matrix, [ROWS, 2 * COLUMNS], 1, 0, 2 * COLUMNS, 2),
        "select_backward": (ATEN.select_backward.default, vector, size, 0, 3),
        "split_with_sizes_copy": (ATEN.split_with_sizes_copy.default, matrix, [256, 512], 1),
        "_unsafe_view": (ATEN._unsafe_view.default, matrix, size),
        "_reshape_copy": (ATEN._reshape_copy.default, matrix, [ROWS * COLUMNS]),
        "embedding": (ATEN.embedding.default, matrix, rows),
        "gather": (ATEN.gather.default, matrix, 1, columns),
        "scatter": (ATEN.scatter.src, matrix, 1, columns, matrix),
        "scatter_": (ATEN.scatter_.value, matrix.clone(), 1, columns, 1.0),
        "scatter_add": (ATEN.scatter_add.default, matrix, 1, columns, matrix),
        "index_select": (ATEN.index_select.default, matrix, 0, rows),
        "index_add": (ATEN.index_add.default, matrix, 0, rows, matrix.new_ones(512, COLUMNS)),
        "index_add_": (ATEN.index_add_.default, matrix.clone(), 0, rows, matrix.new_ones(512, COLUMNS)),
        "native_batch_norm": (ATEN.native_batch_norm.default, images, None, None, None, None, True, 0.1, 1e-5),
        "max_pool2d_with_indices": (ATEN.max_pool2d_with_indices.default, images, [3, 3], [2, 2], [1, 1]),
        "avg_pool2d": (ATEN.avg_pool2d.default, images, [2, 2]),
        "_adaptive_avg_pool2d": (ATEN._adaptive_avg_pool2d.default, images, [4, 4]),
        "nll_loss_backward": (ATEN.nll_loss_backward.default, one, matrix.contiguous(), classes, None, 1, -100, total),
        "nll_loss2d_backward": (
            ATEN.nll_loss2d_backward.default,
            *(one, images.contiguous(), pixels, None, 1, -100, total_of_images),
        ),
        **{name: (getattr(ATEN, name).default, matrix) for name in ("empty_like", "zeros_like", "ones_like")},
        "full_like": (ATEN.full_like.default, matrix, 2.0),
        **{name: (getattr(ATEN, name).default, matrix, size) for name in ("new_empty", "new_zeros", "new_ones")},
        "new_full": (ATEN.new_full.default, matrix, size, 2.0),
        "new_empty_strided": (ATEN.new_empty_strided.default, matrix, size, [COLUMNS, 1]),
        **{name: (getattr(ATEN, name).default, size, kind) for name in ("zeros", "ones", "rand", "randn")},
        "empty": (ATEN.empty.memory_format, size, kind),
        "empty_strided": (ATEN.empty_strided.default, size, [COLUMNS, 1], kind),
        "full": (ATEN.full.default, size, 2.0, kind),
        "arange": (ATEN.arange.default, ROWS * COLUMNS),
        "scalar_tensor": (ATEN.scalar_tensor.default, 2.0),
        "randint": (ATEN.randint.default, 9, size),
        "randperm": (ATEN.randperm.default, ROWS * COLUMNS),
        "normal_": (ATEN.normal_.default, matrix.clone()),
        "uniform_": (ATEN.uniform_.default, matrix.clone()),
        "bernoulli_": (ATEN.bernoulli_.float, matrix.clone(), 0.5),
        "bernoulli": (ATEN.bernoulli.p, matrix, 0.5),
    }


LAYOUTS = {
    "in order": lambda size: torch.rand(size),
    "turned": lambda size: torch.rand(size[::-1]).t() if len(size) == 2 else torch.rand(size).to(memory_format=LAST),
    "with gaps": lambda size: torch.rand(*size, 2)[..., 0],
    "repeated": lambda size: torch.rand(*size[:1], *[1] * (len(size) - 1)).expand(size),
}


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request):
    """Of all the tensors, which tensors in other layouts than the default one keep."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_never_tried_takes_no_scratch_memory(layout, dtype):
    found = calls(*(LAYOUTS[layout](size) for size in ((ROWS, COLUMNS), (4, 16, 32, 32))))
    named = cpu_trials._TAKE_NONE | cpu_trials._TAKE_NONE_IN_ORDER
    assert {f"aten::{name}" for name in found} == named
    taken, tried = {}, set()
    for name, (func, *args) in found.items():
        kwargs = args.pop() if isinstance(args[-1], dict) else {}
        if not is_left_out(func, args):
            tried.add(f"aten::{name}")
            continue
        scratch, _ = measured(func, *args, **kwargs)
        if scratch > 1 << 14:  # Partial sums of each thread.
            taken[name] = scratch
    assert taken == {}
    in_order = layout in ("in order", "turned") and dtype == torch.float32
    assert tried <= (set() if in_order else cpu_trials._TAKE_NONE_IN_ORDER)


def is_left_out(func, args):
    """Is it said, without a trial, that the call takes nothing?"""
    with pytest.MonkeyPatch.context() as patched:
        asked = []
        patched.setattr(lone_calls, "scratch_bytes", lambda *call: asked.append(call) or 0)
        patched.setattr(cpu_trials, "_LEAST_BYTES", 0)
        patched.setattr(cpu_trials, "_known", {})
        cpu_trials.scratch_bytes(func, tuple(args), {}, args[0])
    return not asked


SELDOM = {
    "k-th of each row": lambda: (ATEN.kthvalue.default, torch.rand(ROWS, COLUMNS), 3),
    "windows": lambda: (ATEN.im2col.default, torch.rand(4, 16, 32, 32), [3, 3], [1, 1], [1, 1], [1, 1]),
    "distances": lambda: (ATEN._euclidean_dist.default, torch.rand(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)),
    "half a sum": lambda: (ATEN.sum.dim_IntList, torch.rand(4, 64, 32, 32, dtype=torch.bfloat16), [0, 2, 3]),
    "half the rows": lambda: (
        *(ATEN.gather.default, torch.rand(ROWS, COLUMNS, dtype=torch.bfloat16), 1),
        torch.zeros(ROWS, COLUMNS, dtype=torch.int64),
    ),
    "truths summed": lambda: (ATEN.sum.dim_IntList, torch.rand(ROWS, COLUMNS) > 0.5, [1]),
    "truths summed up": lambda: (ATEN.cumsum.default, torch.rand(ROWS, COLUMNS) > 0.5, 1),
    "truths that weigh": lambda: (ATEN.mul.Tensor, torch.rand(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS) > 0.5),
    "half beside full": lambda: (ATEN.add.Tensor, *(torch.rand(ROWS, COLUMNS, dtype=d) for d in (HALF, torch.float32))),
    "draws": lambda: (ATEN.multinomial.default, torch.rand(ROWS, COLUMNS), 4),
}


@pytest.mark.parametrize("name", SELDOM)
def test_what_has_no_formula_is_tried_once(name, monkeypatch):
    """With stand-ins in place of tensors, as in a trace; random numbers and real tensors stay as they are."""
    func, *args = SELDOM[name]()
    scratch, out = measured(func, *args)
    assert scratch > 1 << 17
    assert not cpu_scratch.workspace_bytes(func, tuple(args), out)
    with FakeTensorMode() as fake:
        stand_ins = tree_map_only(torch.Tensor, fake.from_tensor, args)
        state = torch.random.get_rng_state()
        found = cpu_trials.scratch_bytes(func, tuple(stand_ins), {}, stand_ins[0])
    assert found == pytest.approx(scratch, rel=0.02)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert cpu_trials.known_bytes(func, tuple(args), {}, out) == found
    monkeypatch.setattr(lone_calls, "scratch_bytes", lambda *call: pytest.fail("tried again"))
    assert cpu_trials.scratch_bytes(func, tuple(args), {}, out) == found


@pytest.mark.parametrize("why", ["on no device", "too little", "too much"])
def test_what_is_not_tried(why, monkeypatch):
    monkeypatch.setattr(lone_calls, "scratch_bytes", lambda *call: pytest.fail("tried"))
    monkeypatch.setattr(cpu_trials, "_MOST_BYTES", 1 << 20)
    size = {"on no device": (256, 513), "too little": (64, 127), "too much": (1024, 513)}[why]
    rows = torch.empty(size, device="meta" if why == "on no device" else "cpu")
    assert cpu_trials.scratch_bytes(ATEN.kthvalue.default, (rows, 3), {}, rows) == 0


def test_under_a_profiler_nothing_is_tried_and_nothing_is_remembered():
    rows = torch.rand(ROWS, COLUMNS + 1)
    with torch.autograd.profiler.profile():
        assert cpu_trials.scratch_bytes(ATEN.kthvalue.default, (rows, 3), {}, rows) == 0
    assert cpu_trials.scratch_bytes(ATEN.kthvalue.default, (rows, 3), {}, rows) >= 3 * rows.nbytes


def test_what_cannot_run_alone_is_not_counted():
    """Rows by numbers that are no integers are refused, also when they are made up."""
    args = (torch.rand(ROWS, COLUMNS), 0, torch.rand(ROWS))
    assert lone_calls.scratch_bytes(ATEN.index_fill.int_Tensor, args, {}, torch.device("cpu")) is None
    assert cpu_trials.scratch_bytes(ATEN.index_fill.int_Tensor, args, {}, args[0]) == 0


class Smoothed(torch.nn.Module):
    """Layers, each of which takes the third-smallest number of a row away from it."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x - x.kthvalue(3, dim=-1, keepdim=True).values
        return x.square().mean()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_budget_holds_a_kernel_that_no_formula_knows(mode):
    """Of 2,048 rows its scratch memory is three times as large as a layer's result."""
    torch.manual_seed(0)
    model, x = Smoothed(), torch.randn(2048, 256)
    largest = max(op.workspace_bytes for op in remat.torch.trace(model, x).ops)
    assert largest == pytest.approx(3 * x.nbytes, rel=0.01)
    with pytest.raises(remat.InfeasibleBudget) as refused:
        remat.torch.plan(model, x, budget=1)
    smallest = refused.value.minimum_bytes
    if mode == "eager":
        applied = remat.torch.apply(remat.torch.plan(model, x, budget=smallest))

        def step():
            with applied:
                return model(x)

    else:
        with pytest.raises(remat.InfeasibleBudget) as refused:
            remat.torch.limit_memory(lambda: model(x), 1)()
        smallest = refused.value.minimum_bytes
        step = remat.torch.limit_memory(lambda: model(x), smallest)
    assert remat.torch.measure(step, repeats=1).peak_bytes <= smallest + 64  # The loss that the caller holds.


MATRICES = {
    "in order": lambda *size: torch.rand(size),
    "turned": lambda *size: torch.rand(*size[:-2], size[-1], size[-2]).mT,
    "parts of rows": lambda *size: torch.rand(*size[:-1], 2 * size[-1])[..., : size[-1]],
    "heads": lambda *size: torch.rand(size[-2], *size[:-2], size[-1]).movedim(0, -2),
    "heads turned": lambda *size: torch.rand(size[-1], *size[:-2], size[-2]).movedim(0, -1),
    "with gaps": lambda *size: torch.rand(*size, 2)[..., 0],
    "one number": lambda *size: torch.rand([1] * len(size)).expand(size),
}


@pytest.mark.parametrize("right", MATRICES)
@pytest.mark.parametrize("left", MATRICES)
@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_products_copy_what_does_not_lie_as_they_read_it(name, left, right, dtype):
    if dtype != torch.float32 and not _private.onednn_computes(dtype):
        pytest.skip("PyTorch's own kernels run products in half precision on this CPU")
    batch = () if name == "mm" else (8,)
    args = (MATRICES[left](*batch, 96, 200), MATRICES[right](*batch, 200, 256))
    func = getattr(ATEN, name).default
    scratch, out = measured(func, *args)
    assert cpu_scratch.workspace_bytes(func, args, out) == pytest.approx(scratch, rel=0.02, abs=8192)
