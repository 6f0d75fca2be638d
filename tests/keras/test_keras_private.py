"""Each private Keras symbol that remat needs is where it was; if a release moves one, this says which."""

from __future__ import annotations

import importlib
import inspect

import keras
import numpy as np
import pytest
from accumulation import compiled, cross_entropy, dense

from remat.keras import _private

MOVED = (
    f"Keras {keras.__version__} has no {{name}} any more: remat reaches it in src/remat/keras/_private.py, which needs "
    "another way to do the same"
)
SYMBOLS = [
    ("keras.src.losses.loss", "reduce_weighted_values", ["values", "sample_weight", "mask", "reduction", "dtype"]),
    ("keras.src.losses.loss", "apply_mask", ["sample_weight", "mask", "dtype", "reduction"]),
    ("keras.src.trainers.compile_utils", "CompileLoss", ["loss", "loss_weights"]),
    ("keras.src.ops.function", "Function._run_through_graph", ["inputs"]),
    ("keras.src.ops.symbolic_arguments", "SymbolicArguments.fill_in", ["tensor_dict"]),
    ("keras.src.utils.backend_utils", "in_tf_graph", []),
    ("keras.src.utils.backend_utils", "in_grain_data_pipeline", []),
    ("keras.src.utils.backend_utils", "DynamicBackend.__getattr__", ["name"]),
    ("keras.src.utils.naming", "auto_name", ["prefix"]),
    ("keras.src.tree.torchtree_impl", "_dict_to_ordered_dict", ["structure"]),
    ("keras.src.backend.torch.random", "torch_seed_generator", ["seed"]),
    ("keras.src.backend.torch.random", "draw_seed", ["seed"]),
    ("keras.src.backend.torch.nn", "_can_use_flash_attention", ["query", "key", "value", "mask", "raise_error"]),
]
ATTRIBUTES = [
    "_aggregate_additional_loss",
    "_call_has_training_arg",
    "_compile_loss",
    "_compile_metrics",
    "_flatten_layers",
    "_loss_tracker",
]


@pytest.mark.parametrize(("module", "name", "parameters"), SYMBOLS)
def test_function_takes_what_it_took(module, name, parameters):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    assert found is not None, MOVED.format(name=f"{module}.{name}")
    for parameter in parameters:
        assert parameter in inspect.signature(found).parameters, MOVED.format(name=f"{parameter!r} of {module}.{name}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_model_has_what_it_had(name):
    assert hasattr(compiled(dense()), name), MOVED.format(name=f"Model.{name}")


def test_a_model_knows_whether_its_call_is_part_of_another():
    found = []

    class Asking(keras.Model):
        def call(self, x):
            found.append(_private.is_trained_itself(self))
            return x

    inner = Asking()
    inner.compile()
    inner(np.ones((2, 3)))
    keras.Sequential([inner])(np.ones((2, 3)))
    assert found[0], MOVED.format(name="entry_layer of a call context")
    assert not found[-1], MOVED.format(name="entry_layer of a call context")


def test_a_loss_reduces_where_it_can_be_seen():
    loss = cross_entropy(reduction="mean_with_sample_weight")
    with _private.reductions_recorded() as found:
        loss(np.array([0, 1]), np.zeros((2, 3), "float32"), np.array([0.5, 2.0]))
    assert len(found) == 1, MOVED.format(name="call of reduce_weighted_values in Loss.__call__")
    assert found[0].kind == "mean_with_sample_weight"
    np.testing.assert_allclose(found[0].values, np.log([3.0, 3.0]), rtol=1e-6)
    np.testing.assert_allclose(found[0].weights(), [0.5, 2.0])
    with _private.reductions_recorded() as after:
        pass
    loss(np.array([0]), np.zeros((1, 3), "float32"))
    assert after == []


def test_the_losses_of_a_model_can_be_replaced():
    model = compiled(dense(), metrics=None)
    model.train_on_batch(np.ones((2, 6), "float32"), np.array([0, 1]))
    compile_loss = _private.compile_loss_of(model)
    entries = []
    with _private.losses_replaced(compile_loss, lambda entry: entries.append(entry) or (lambda *_: 5.0)):
        assert float(compile_loss(np.array([0, 1]), np.zeros((2, 3), "float32"))) == 5.0
    assert entries[0].loss is model.loss
    assert entries[0].loss_weights is None
    assert compile_loss._flat_losses[0].loss is model.loss
