"""What remat knows of Paddle's operators: which may repeat, and how, what they cost, whose bytes they take over.

Everything unknown is kept: an operator may run twice only if it is one of Paddle's own, draws nothing at random, writes
to nothing that it is given, talks to nobody, and holds no block of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

OWN_DIALECT: Final = "pd_op."

# The tables below were read from the operators of Paddle 3.3. An operator that is missing in one of the first two would
# run twice where it must not; the others decide only how well a plan is.
_RANDOM: Final = frozenset(
    {
        "bernoulli",
        "binomial",
        "dirichlet",
        "dropout",
        "exponential_",
        "flash_attn",
        "flash_attn_qkvpacked",
        "flash_attn_unpadded",
        "flash_attn_varlen_qkvpacked",
        "fused_attention",
        "fused_dropout_add",
        "fused_feedforward",
        "gaussian",
        "gumbel_softmax",
        "memory_efficient_attention",
        "multinomial",
        "nce",
        "poisson",
        "randint",
        "random_routing",
        "randperm",
        "rrelu",
        "seed",
        "shuffle_batch",
        "standard_gamma",
        "top_p_sampling",
        "truncated_gaussian_random",
        "uniform",
        "uniform_random_batch_size_like",
    }
)
_TALKS: Final = frozenset(
    {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "assert",
        "barrier",
        "broadcast",
        "data",
        "depend",
        "feed",
        "fetch",
        "partial_allgather",
        "partial_recv",
        "partial_send",
        "print",
        "py_func",
        "read_file",
        "recv_v2",
        "reduce",
        "reduce_scatter",
        "send_v2",
        "share_data",
        "share_var",
        "shadow_feed",
        "shadow_feed_tensors",
        "shadow_output",
    }
)
_TALKING_PREFIXES: Final = ("c_", "mp_", "global_", "distributed_", "push_", "pull_", "send_", "recv_", "print")

# What a dropout drew is its second result. With it, the first can be made again: dropout_grad(mask, x) scales x by the
# mask as the forward pass did, to the bit.
DROPOUT: Final = "dropout"
# A batch normalisation moves running statistics, the operands and results that stand here. Another run is given copies.
BATCH_NORM: Final = frozenset({"batch_norm_", "sync_batch_norm_"})
STATISTICS_OPERANDS: Final = (1, 2)
STATISTICS_RESULTS: Final = (1, 2)

# Recurrent layers draw the mask of their dropout; without dropout they repeat.
_RECURRENT: Final = frozenset({"rnn", "cudnn_lstm"})

_FLOPS_PER_ELEMENT: Final = {
    # Judgements by the usual polynomial and table methods, not measured. Element-wise operators are bound by the bytes
    # that they move, so that a figure that is twice too large or too small hardly changes a plan.
    name: flops
    for flops, names in (
        (4.0, ("divide", "rsqrt", "sqrt", "reciprocal")),
        (12.0, ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "swish", "softmax", "log_softmax")),
        (20.0, ("gelu", "erf", "pow", "mish", "softplus", "silu_grad", "gelu_grad", "cross_entropy_with_softmax")),
        (40.0, ("bernoulli", "dropout", "gaussian", "uniform", "truncated_gaussian_random")),
        (6.0, ("layer_norm", "batch_norm_", "group_norm", "instance_norm", "rms_norm")),
    )
    for name in names
}
CONVOLUTIONS: Final = frozenset({"conv2d", "conv3d", "depthwise_conv2d"})
TRANSPOSED: Final = frozenset({"conv2d_transpose", "conv3d_transpose", "depthwise_conv2d_transpose"})

_ELEMENT_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def kind(op: Any) -> str:
    """The operator without its dialect: "matmul"."""
    return str(op.name()).rpartition(".")[2]


def is_own(op: Any) -> bool:
    """Is it an operator of Paddle's own, and not one of the program's grammar (combine, parameter)?"""
    return str(op.name()).startswith(OWN_DIALECT)


def dtype_name(dtype: Any) -> str:
    """The short name of a data type of the program: "float32"."""
    name = str(dtype).rpartition(".")[2].lower()
    return {"undefined": "float32"}.get(name, name)


def element_bytes(dtype: Any) -> int:
    """Bytes of one element."""
    return _ELEMENT_BYTES.get(dtype_name(dtype), 4)


def is_test(op: Any) -> bool:
    """Was the operator written for inference? A dropout then draws nothing."""
    return bool(op.attrs().get("is_test", False))


def may_repeat(op: Any) -> bool:
    """May the operator run a second time with the same result and no other effect?

    Dropout and batch normalisation are left to whoever asks: they repeat in their own ways.
    """
    name = kind(op)
    if not is_own(op) or name.endswith("_") or list(op.blocks()):
        return False
    if name in _RECURRENT:
        return is_test(op) or not float(op.attrs().get("dropout_prob", 0.0))
    return not (name in _RANDOM or name in _TALKS or name.startswith(_TALKING_PREFIXES))


def flops(op: Any, operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]) -> float:
    """Floating-point operations of one run; a multiplication and an addition count as two.

    Args:
        op: the operator.
        operands: the shapes of its operands; None for one that is absent or no tensor.
        results: those of its results.
    """
    name = kind(op)
    base, is_grad = (name[:-5], True) if name.endswith("_grad") else (name, False)
    factor = 2.0 if is_grad else 1.0
    if base in ("matmul", "bmm", "mv", "dot", "mul", "fc", "fused_gemm_epilogue"):
        return factor * _product(op, operands, results, is_grad)
    if base in CONVOLUTIONS or base in TRANSPOSED:
        return factor * _convolution(base, operands, is_grad, results)
    if base in _RECURRENT:
        weights = sum(math.prod(shape) for shape in operands if shape and len(shape) == 2)
        lead = next((shape for shape in operands if shape and len(shape) == 3), (1, 1, 1))
        return 2.0 * factor * lead[0] * lead[1] * weights
    elements = max((math.prod(shape) for shape in (*operands, *results) if shape is not None), default=0)
    return _FLOPS_PER_ELEMENT.get(name, 1.0) * elements


def _product(
    op: Any, operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None], is_grad: bool
) -> float:
    """Operations of a matrix product: twice the elements of the result times the length of the summed axis."""
    left, right = (operands[n] if n < len(operands) else None for n in (0, 1))
    if not left or not right:
        return 0.0
    summed = left[-2] if op.attrs().get("transpose_x", False) and len(left) > 1 else left[-1]
    if is_grad:
        gradient = next((shape for shape in reversed(operands) if shape is not None), None)
        made = math.prod(gradient) if gradient is not None else 0
    else:
        made = math.prod(results[0]) if results and results[0] is not None else 0
    return 2.0 * made * summed


def _convolution(
    base: str, operands: Sequence[Sequence[int] | None], is_grad: bool, results: Sequence[Sequence[int] | None]
) -> float:
    """Operations of a convolution: each position of the larger side meets each weight of its channel once."""
    kernel = operands[1] if len(operands) > 1 else None
    image = operands[0] if operands else None
    if not kernel or not image:
        return 0.0
    if base in TRANSPOSED:
        positions = math.prod(image) // max(1, image[1])
    else:
        made = operands[-1] if is_grad else (results[0] if results else None)
        positions = math.prod(made) // max(1, made[1]) if made else 0
    return 2.0 * positions * math.prod(kernel)


def is_gradient(op: Any) -> bool:
    """Is it an operator of the backward pass?"""
    return is_gradient_kind(kind(op))


def is_gradient_kind(name: str) -> bool:
    """Is it the name of an operator of the backward pass, without its dialect?"""
    return name.endswith(("_grad", "_grad_"))


# Which operators' results take over an operand's bytes, where nothing reads them any more. Paddle's executor has a pass
# that puts the form in place of an operator in its place. These are its operators of Paddle 3.3 that have such a form,
# but for those that the pass leaves out on a CPU (add_grad, subtract_grad, transpose). For one that is missing a step
# is predicted to need more than it does; for one too many, less.
_FIRST_OPERAND: Final = """
abs acos acosh add addmm asin asinh assign atan atanh baddbmm bce_loss bitwise_and bitwise_not bitwise_or bitwise_xor
cast ceil clip copysign cos cosh cross_entropy_with_softmax cumprod cumsum digamma divide dropout elu equal erf erfinv
exp expm1 flatten floor floor_divide greater_equal greater_than hardtanh index_add index_put leaky_relu lerp
less_equal less_than lgamma log log10 log1p log2 logical_and logical_not logical_or logical_xor logit masked_fill
multiply not_equal pow put_along_axis reciprocal relu remainder renorm reshape round rsqrt scale scatter set_value
set_value_with_tensor sigmoid sigmoid_cross_entropy_with_logits silu sin sinh softmax sqrt square squeeze subtract tan
tanh thresholded_relu tril triu trunc unsqueeze
"""
_GRADIENT_OF_RESULT: Final = """
acos acosh asin asinh atan atanh bce_loss ceil celu clip cos cosh elu exp expm1 fill_diagonal_tensor flatten floor
hardshrink hardsigmoid hardswish hardtanh leaky_relu log10 log1p log2 log logsigmoid masked_fill mish pow reciprocal
relu6 relu reshape round rsqrt sigmoid_cross_entropy_with_logits sigmoid silu sin sinh softplus softshrink softsign
sqrt square squeeze swish tan tanh tanh_shrink thresholded_relu unsqueeze
"""
_TAKES_FIRST: Final = frozenset(_FIRST_OPERAND.split())
_TAKES_NAMED: Final = {
    **{f"{name}_grad": "out_grad" for name in _GRADIENT_OF_RESULT.split()},
    "cross_entropy_with_softmax_grad": "softmax",
    "group_norm_grad": "y_grad",
    "where": "x",
}


def takeovers(op: Any) -> dict[int, int]:
    """For each result that takes over an operand's bytes where it may, by its place, the place of the operand."""
    name = kind(op)
    if name in _TAKES_FIRST:
        return {0: 0}
    if (operand := _TAKES_NAMED.get(name)) is not None:
        names = list(op.get_input_names())
        return {0: names.index(operand)} if operand in names else {}
    return {}
