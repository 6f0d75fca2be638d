"""Which operators' results take over an operand's bytes, where nothing reads them any more.

Paddle's executor has a pass that puts the form in place of an operator in its place. The tables below are its operators
of Paddle 3.3 that have such a form, but for those that the pass leaves out on a CPU (``add_grad``, ``subtract_grad``,
``transpose``). For one that is missing here a step is predicted to need more than it does; for one too many, less.
"""

from __future__ import annotations

from typing import Any, Final

from remat.paddle.trace import op_facts

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
}


def takeovers(op: Any) -> dict[int, int]:
    """For each result that takes over an operand's bytes where it may, by its place, the place of the operand."""
    name = op_facts.kind(op)
    if name in _TAKES_FIRST:
        return {0: 0}
    if (operand := _TAKES_NAMED.get(name)) is not None:
        names = list(op.get_input_names())
        return {0: names.index(operand)} if operand in names else {}
    return {}
