"""``fit`` under a limit does what plain ``fit`` does, in every way of feeding and steering it."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from small_models import (
    BATCH,
    BEST,
    BUDGET,
    BUILDERS,
    QUICK,
    WIDTH,
    assert_same,
    assert_same_variables,
    both,
    compiled,
    data,
    functional,
    limit,
)

import remat

pytestmark = pytest.mark.other_cpu


def fit(x, y=None, **options):
    defaults = {"epochs": 2, "shuffle": False, "verbose": 0}
    if not isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        defaults["batch_size"] = BATCH
    return lambda model: model.fit(x, y, **{**defaults, **options})


@pytest.mark.parametrize(
    "build",
    [pytest.param(b, marks=pytest.mark.slow) if b.__name__ == "sequential" else b for b in BUILDERS],
    ids=lambda b: b.__name__,
)
def test_every_kind_of_model(build):
    assert_same(*both(build, fit(*data()), BEST if build is functional else QUICK))


def test_own_train_step_is_kept():
    _, limited = both(BUILDERS[-1], fit(*data()))

    assert list(limited.history) == ["doubled_loss"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sample_weight": np.linspace(0.1, 2, 3 * BATCH)}, id="sample_weight"),
        pytest.param({"class_weight": {n: 0.5 + n for n in range(10)}}, id="class_weight"),
        pytest.param({"validation_split": 0.25}, id="validation_split", marks=pytest.mark.slow),
        pytest.param({"shuffle": True}, id="shuffle", marks=pytest.mark.slow),
        pytest.param({"initial_epoch": 1, "epochs": 3}, id="initial_epoch", marks=pytest.mark.slow),
        pytest.param({"steps_per_epoch": 2}, id="steps_per_epoch", marks=pytest.mark.slow),
    ],
)
def test_options_of_fit(options):
    assert_same(*both(functional, fit(*data(), **options)))


@pytest.mark.thorough
def test_validation_data():
    plain, limited = both(functional, fit(*data(), validation_data=data(BATCH // 2, seed=1)))

    assert_same(plain, limited)
    assert "val_accuracy" in limited.history


@pytest.mark.parametrize("samples", [pytest.param(2 * BATCH + 1, marks=pytest.mark.slow), 2 * BATCH + 700])
def test_a_last_short_batch(samples):
    assert_same(*both(functional, fit(*data(samples))))


@pytest.mark.slow
def test_fewer_samples_than_a_batch():
    assert_same(*both(functional, fit(*data(BATCH), batch_size=4 * BATCH)))


@pytest.mark.parametrize("samples", [pytest.param(4 * BATCH, marks=pytest.mark.slow), 3 * BATCH + 100])
def test_several_steps_per_execution(samples):
    assert_same(*both(functional, fit(*data(samples)), steps_per_execution=2))


def test_callbacks_see_every_batch_and_may_stop():
    def run(model):
        seen = []

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append((batch, float(logs["loss"])))

            def on_epoch_end(self, epoch, logs=None):
                self.model.optimizer.learning_rate = 0.01
                self.model.stop_training = epoch == 1

        history = model.fit(*data(), batch_size=BATCH, epochs=5, shuffle=False, verbose=0, callbacks=[Watch()])
        return {**history.history, "seen": [loss for _, loss in seen]}

    plain, limited = both(functional, run)
    assert len(plain.history["seen"]) == 6
    assert_same(plain, limited)


@pytest.mark.slow
def test_learning_rate_schedule_and_clipping():
    def optimizer():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
        return keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=0.1)

    trained = []
    for limited in (False, True):
        model = compiled(functional, optimizer=optimizer())
        if limited:
            limit(model)
        trained.append(fit(*data())(model))
    np.testing.assert_allclose(trained[0].history["loss"], trained[1].history["loss"], rtol=1e-5)


@pytest.mark.thorough
def test_regularisers_and_added_losses_count_once():
    @keras.saving.register_keras_serializable("remat_tests")
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(x)))
            return x

    def build():
        inputs = keras.Input((WIDTH,))
        x = inputs
        for _ in range(3):
            x = layers.Dense(2 * WIDTH, activation="gelu", kernel_regularizer="l2", activity_regularizer="l2")(x)
            x = Penalty()(x)
        return keras.Model(inputs, layers.Dense(10)(x))

    assert_same(*both(build, fit(*data())))


def dataset(batch, drop_remainder, samples=2 * BATCH + 300):
    return tf.data.Dataset.from_tensor_slices(data(samples)).batch(batch, drop_remainder=drop_remainder)


@pytest.mark.parametrize("drop_remainder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_datasets(drop_remainder):
    plain, limited = both(functional, fit(dataset(BATCH, drop_remainder)))

    assert_same(plain, limited)
    assert limited.model.optimizer.iterations == 2 * (2 if drop_remainder else 3)


@pytest.mark.thorough
def test_dataset_of_unknown_batch_size():
    batches = dataset(BATCH, False)
    signature = (tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64))

    def unknown():
        return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)

    assert_same(*both(functional, lambda model: fit(unknown())(model)))


@pytest.mark.slow
def test_python_generator():
    x, y = data()

    def generate():
        while True:
            for start in range(0, len(x), BATCH):
                yield x[start : start + BATCH], y[start : start + BATCH]

    assert_same(*both(functional, lambda model: model.fit(generate(), steps_per_epoch=3, epochs=2, verbose=0)))


@pytest.mark.slow
def test_pydataset():
    x, y = data()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            part = slice(index * BATCH, (index + 1) * BATCH)
            return x[part], y[part]

    assert_same(*both(functional, lambda model: fit(Batches())(model)))


def two_inputs_and_outputs():
    inputs = {"left": keras.Input((WIDTH,), name="left"), "right": keras.Input((WIDTH,), name="right")}
    x = layers.Concatenate()(list(inputs.values()))
    for _ in range(3):
        x = layers.Dropout(0.1)(layers.Dense(2 * WIDTH, activation="gelu")(x))
    return keras.Model(inputs, {"kind": layers.Dense(10, name="kind")(x), "size": layers.Dense(1, name="size")(x)})


@pytest.mark.thorough
def test_dict_inputs_and_several_outputs():
    x, y = data()
    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}

    assert_same(
        *both(
            two_inputs_and_outputs,
            fit({"left": x, "right": x[::-1].copy()}, {"kind": y, "size": x[:, :1]}),
            loss=loss,
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": "accuracy"},
        )
    )


@pytest.mark.slow
def test_train_on_batch():
    x, y = data()

    def run(model):
        steps = [model.train_on_batch(x[n * BATCH : (n + 1) * BATCH], y[n * BATCH : (n + 1) * BATCH]) for n in range(3)]
        return {"loss": [float(loss) for loss, _ in steps], "accuracy": [float(a) for _, a in steps]}

    assert_same(*both(functional, run))


@pytest.mark.thorough
def test_a_larger_batch_is_planned_again():
    x, y = data()
    peaks = []

    def run(model):
        losses = []
        for size in (BATCH, BATCH // 2, 2 * BATCH):
            losses.append(float(model.train_on_batch(x[:size], y[:size])[0]))
            with contextlib.suppress(ValueError):  # The plain model has no plan.
                peaks.append(remat.keras.plan_of(model).baseline_peak_bytes)
        return {"loss": losses}

    assert_same(*both(functional, run))
    first, smaller, larger = peaks
    assert smaller == pytest.approx(first, rel=0.1)
    assert larger > 1.5 * first


@pytest.mark.slow
def test_a_larger_batch_in_a_later_fit_is_planned_again():
    model = limit(compiled(functional))
    fit(*data(), epochs=1)(model)
    first = remat.keras.plan_of(model)
    fit(*data(), epochs=1, batch_size=2 * BATCH)(model)

    assert remat.keras.plan_of(model).baseline_peak_bytes > 1.5 * first.baseline_peak_bytes


@pytest.mark.slow
def test_compiling_again_keeps_the_limit():
    def run(model):
        first = fit(*data())(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
        second = fit(*data())(model)
        return {"first": first.history["loss"], "second": second.history["loss"]}

    assert_same(*both(functional, run))


@pytest.mark.slow
def test_a_model_may_be_limited_before_it_is_compiled():
    model = limit(functional())
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    fit(*data())(model)

    assert remat.keras.plan_of(model).recomputed > 0


@pytest.mark.slow
def test_a_second_limit_replaces_the_first():
    model = limit(compiled(functional), "95%")
    fit(*data())(model)
    first = remat.keras.plan_of(model)
    limit(model, BUDGET)
    assert remat.keras.plan_of(model) is None
    fit(*data())(model)

    assert remat.keras.plan_of(model).peak_bytes < first.peak_bytes


def test_a_limit_comes_off_again():
    model = limit(compiled(functional))
    assert remat.keras.limit_memory(model, None) is model
    assert remat.keras.limit_memory(model, None) is model
    with pytest.raises(ValueError, match="has no memory limit"):
        remat.keras.plan_of(model)
    assert "make_train_function" not in vars(model)
    fit(*data())(model)


@pytest.mark.slow
def test_two_models_have_limits_of_their_own():
    one, other = limit(compiled(functional), "95%"), limit(compiled(functional), BUDGET)
    fit(*data())(one)
    fit(*data())(other)

    assert remat.keras.plan_of(one).recomputed < remat.keras.plan_of(other).recomputed


@pytest.mark.slow
def test_evaluate_and_predict_stay_plain():
    plain, limited = both(functional, fit(*data()))

    np.testing.assert_allclose(
        limited.model.evaluate(*data(), verbose=0), plain.model.evaluate(*data(), verbose=0), 1e-4
    )
    np.testing.assert_allclose(
        limited.model.predict(data()[0], verbose=0), plain.model.predict(data()[0], verbose=0), atol=1e-3
    )


@pytest.mark.slow
def test_a_budget_that_the_plain_step_keeps_changes_nothing():
    model = compiled(functional)
    remat.keras.limit_memory(model, "64GiB", **BEST)
    fit(*data())(model)

    assert remat.keras.plan_of(model).recomputed == 0
    plain = compiled(functional)
    keras.utils.set_random_seed(3)
    fit(*data())(plain)
    assert_same_variables(model, plain)


@pytest.mark.slow
def test_planner_and_its_options_are_passed_on():
    model = compiled(functional)
    remat.keras.limit_memory(model, "90%", planner="peak_greedy")
    fit(*data())(model)

    assert remat.keras.plan_of(model).planner == "peak_greedy"


def head_model():
    tokens = keras.Input((32,), dtype="int32")
    x = keras.layers.Dense(16, activation="tanh")(keras.layers.Embedding(4000, 16)(tokens))
    model = keras.Model(tokens, keras.layers.Dense(4000)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2), loss, metrics=["accuracy"], jit_compile=False)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(("micro_batches", "budget"), [(1, "50%"), (2, "30%")])
def test_fit_runs_the_head_in_slices_for_batches_of_two_sizes(micro_batches, budget):
    random = np.random.default_rng(0)
    x, y = (random.integers(0, 4000, (13, 32)).astype("int32") for _ in range(2))
    weights = random.random((13, 32)).astype("float32")
    trained = []
    for is_limited in (False, True):
        keras.utils.set_random_seed(0)
        model = head_model()
        if is_limited:
            options = {"micro_batches": micro_batches, "planner": "peak_greedy"}
            remat.keras.limit_memory(model, budget, levers=("recompute", "split"), **options)
        history = model.fit(x, y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0)
        trained.append((model, history.history))
    plan = remat.keras.plan_of(trained[1][0])
    assert plan.split is not None
    assert plan.peak_bytes <= plan.budget_bytes <= int(budget[:-1]) / 100 * plan.baseline_peak_bytes + 1
    for one, other in zip(trained[0][0].get_weights(), trained[1][0].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert trained[0][1]["accuracy"] == trained[1][1]["accuracy"]


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [None, 1.0])
def test_updates_run_as_soon_as_their_gradient_is_final(clip):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    trained = []
    for levers in (("recompute",), None):
        keras.utils.set_random_seed(0)
        inner = [keras.layers.Dense(200, activation="relu") for _ in range(8)]
        model = keras.Sequential([keras.Input((16,)), *inner, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-3, global_clipnorm=clip), "mse", jit_compile=False)
        remat.keras.limit_memory(model, "200%", levers=levers, planner="peak_greedy")
        for _ in range(2):
            model.train_on_batch(x, x[:, :1])
        trained.append(model)
    plain, plan = (remat.keras.plan_of(model) for model in trained)
    gradients_bytes = 4 * trained[0].count_params()
    for one, other in zip(trained[0].get_weights(), trained[1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    if clip is None:
        assert plan.update.saved_bytes > 0.7 * gradients_bytes
        assert plain.measured_peak_bytes is None or plan.update.moved > 0
        assert plan.baseline_peak_bytes < plain.baseline_peak_bytes - 0.7 * gradients_bytes
    else:
        assert plan.update.moved == 0
        assert plan.update.bound_by
        assert plan.update.waiting_bytes > 0.99 * gradients_bytes
        assert "wait for" in str(plan)


@pytest.mark.thorough
def test_what_is_recomputed_reads_the_weights_from_before_their_early_update():
    x = np.random.default_rng(0).normal(size=(2048, 16)).astype("float32")
    trained = []
    for budget in (None, "60%"):
        keras.utils.set_random_seed(0)
        inner = [keras.layers.Dense(128, activation="tanh") for _ in range(8)]
        model = keras.Sequential([keras.Input((16,)), *inner, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        if budget is not None:
            remat.keras.limit_memory(model, budget)
        for _ in range(3):
            model.train_on_batch(x, x[:, :1])
        trained.append(model)
    plan = remat.keras.plan_of(trained[1])
    assert plan.update.moved > 0
    assert plan.recomputed > 0
    assert plan.measured_peak_bytes is None or plan.measured_peak_bytes <= 1.01 * plan.budget_bytes
    for one, other in zip(trained[0].get_weights(), trained[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
