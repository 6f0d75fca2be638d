"""Each private JAX symbol that remat needs is where it was; if a release moves one, this says which."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import remat.jax
from remat.jax import _private

SYMBOLS = [
    ("jax._src.source_info_util", "current_name_stack"),
    ("jax._src.source_info_util", "user_context"),
    ("jax._src.core", "nonempty_axis_env"),
    ("jax._src.distributed", "global_state"),
    ("jax._src.effects", "remat_allowed_effects"),
    ("jax._src.interpreters.batching", "batch_jaxpr_axes"),
    ("jax._src.interpreters.batching", "zero_if_mapped"),
    ("jax._src.interpreters.partial_eval", "convert_constvars_jaxpr"),
    ("jax._src.named_sharding", "UNSPECIFIED"),
    ("jax._src.ad_util", "Zero"),
    ("jax._src.interpreters.ad", "instantiate_zeros"),
    *([("jax.experimental.hijax", _private.OWN_CALLS)] if _private.HAS_OWN_CALLS else []),
    ("jax.extend.core", "ClosedJaxpr"),
    ("jax.extend.core", "Jaxpr"),
    ("jax.extend.core", "JaxprEqn"),
    ("jax.extend.core", "Literal"),
    ("jax.extend.core", "Var"),
    ("jax.extend.core", "jaxpr_as_fun"),
    ("jax.extend.core.primitives", "add_p"),
    ("jax._src.state.types", "AbstractRef"),
]
PRIVATE = ("jax._src", "jax.extend", "jax.experimental")
MOVED = (
    f"JAX {jax.__version__} has no {{name}} any more: remat reaches it in src/remat/jax/_private.py, which needs "
    "another way to do the same"
)


@pytest.mark.parametrize(("module", "name"), SYMBOLS, ids=lambda part: part)
def test_symbol_is_there(module, name):
    try:
        found = hasattr(importlib.import_module(module), name)
    except ImportError:
        found = False
    assert found, MOVED.format(name=f"{module}.{name}")


def test_the_rule_of_a_call_is_found():
    (call,) = jax.make_jaxpr(jax.nn.relu)(jnp.ones(3)).eqns
    if call.primitive.name != "custom_jvp_call":
        (call,) = call.params["jaxpr"].eqns
    assert call.primitive.name == "custom_jvp_call", MOVED.format(name="custom_jvp_call")
    assert _private.RULE_OF_A_CALL in call.params, MOVED.format(name=f"custom_jvp_call's {_private.RULE_OF_A_CALL}")

    rule, constants, are_zero = _private.rule_of_call(call)
    assert len(rule.invars) == 2  # A value and its tangent.
    assert (list(constants), list(are_zero)) == ([], [False])
    assert ".py:" in _private.source_of_rule(call)


def test_private_modules_are_imported_in_one_file_only():
    folder = Path(inspect.getsourcefile(remat.jax)).parent
    paths = list(folder.rglob("*.py"))
    assert folder / "trace" / "program.py" in paths
    for path in paths:
        private = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PRIVATE)
        }
        assert not private or path == folder / "_private.py", (path, private)


def test_an_equation_is_evaluated_as_it_was_traced():
    closed = jax.make_jaxpr(lambda x: jnp.sort(x)[::-1])(jnp.array([3.0, 1.0, 2.0]))
    values = [jnp.array([3.0, 1.0, 2.0])]
    for eqn in closed.jaxpr.eqns:
        values = _private.evaluate(eqn, values[: len(eqn.invars)])
    assert values[0].tolist() == [3.0, 2.0, 1.0]


def test_a_plain_call_is_told_from_one_with_shardings():
    def calls(**options):
        traced = jax.make_jaxpr(lambda x: jax.jit(jnp.sin, **options)(x))(1.0)
        return [_private.is_plain_call(eqn) for eqn in traced.jaxpr.eqns]

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert calls() == [True]
    assert calls(in_shardings=device) == [False]


def test_known_primitives_are_named():
    names = _private.primitive_names()
    assert {"dot_general", "name", "tanh", "random_bits", "scan", "psum", "add_any", "reduce_sum"} <= names
    assert not {"io_callback", "pure_callback", "debug_print", "ffi_call", "pallas_call"} & names


def test_tracers_are_told_from_arrays():
    seen = []
    jax.make_jaxpr(lambda x: seen.append(_private.is_traced(x)) or x)(1.0)
    assert seen == [True]
    assert not _private.is_traced(jnp.ones(2))


def test_a_body_under_recompute_is_found():
    traced = jax.make_jaxpr(remat.jax.recompute(lambda x: jnp.sin(x) * 2))(1.0)
    (body,) = (_private.body_of_recomputed_call(eqn) for eqn in traced.jaxpr.eqns)
    assert [eqn.primitive.name for eqn in body.jaxpr.eqns] == ["sin", "mul"]
    assert _private.body_of_recomputed_call(body.jaxpr.eqns[0]) is None


def test_a_batch_is_told_from_what_all_share():
    ours = remat.jax.recompute(lambda a, b: (a + b, b * 2.0))
    sums, doubled = jax.vmap(ours, in_axes=(0, None), out_axes=(0, None))(jnp.arange(3.0), jnp.float32(1))
    assert sums.tolist() == [1.0, 2.0, 3.0]
    assert doubled.tolist() == 2.0


def test_what_jax_checkpoint_refuses_is_told():
    from jax.experimental import io_callback

    def effects_of(function):
        return _private.effects_that_forbid_recomputation(jax.make_jaxpr(function)(1.0))

    assert effects_of(lambda x: jax.debug.print("{}", x)) == []
    assert effects_of(lambda x: io_callback(lambda v: None, None, x)) == ["IOEffect"]


def test_the_store_of_processes_is_where_it_was():
    state = importlib.import_module("jax._src.distributed").global_state
    assert hasattr(state, "client"), MOVED.format(name="client of jax._src.distributed.global_state")
    client = importlib.import_module("jax._src.lib")._jax.DistributedRuntimeClient
    for name in ("key_value_set", "blocking_key_value_get"):
        assert hasattr(client, name), MOVED.format(name=name)
