"""What every test runs under: quiet frameworks on the CPU, with counters that work."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# TensorFlow counts CPU memory only while oneDNN is on, which is the default on some CPUs only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# A test of a plan makes it, and leaves none in the user's folder.
os.environ["REMAT_PLAN_CACHE"] = "off"

THOROUGH = {
    "test_block_chain.py": ("within_its_budget[0.3-True",),
    "test_cli_step.py": ("torch_step", "jax_step", "what_to_write[tensorflow", "what_to_write[torch"),
    "test_demo.py": ("",),
    "test_front_ends.py": (
        *(f"test_keras[{name}-a_plan_of_an_earlier" for name in ("jax", "tensorflow", "torch")),
        *(
            f"test_keras[jax-{check}"
            for check in ("random_draws", "micro_batches_give", "a_budget_that_nothing_fits", "a_share_with_micro")
        ),
    ),
    "test_jax_calls.py": ("names_are_hints",),
    "test_jax_exact.py": ("transformer-70", "convnet-70", "near_the_minimum", "grad_and_aux"),
    "test_jax_first_run.py": ("planned_again_once[value_and_grad",),
    "test_jax_libraries.py": ("optax[nnx",),
    "test_jax_micro_batches.py": ("[sum_loss-", "[a part without tokens"),
    "test_jax_recurrences.py": ("two_stacked_grus", "every_kind_are_exact[61-48"),
    "test_jax_scans.py": ("the_smallest_budget_keeps",),
    "test_jax_sharding.py": ("units_over_a_model_axis",),
    "test_jax_split.py": ("without_jax[value_and_grad", "in_slices[2"),
    "test_jax_transforms.py": ("plain_jit_saves_what_ours_saves[mlp]", "closed_over_tracers", "differentiated_again"),
    "test_keras_checkpoints.py": ("test_training_is_the_same",),
    "test_keras_choose.py": ("a_line_per_option",),
    "test_keras_errors.py": ("below_the_minimum_then_at_it",),
    "test_keras_fit.py": (
        "OwnTrainStep",
        "sequential_without_input",
        "several_steps",
        "own_train_step",
        "last_short_batch",
        "every_kind_of_model[functional",
        "test_datasets[True",
        "every_kind_of_model[Subclassed",
        "callbacks_see_every_batch",
    ),
    "test_keras_jax.py": ("what_is_refused[eager", "a_short_last_batch", "tensorflow_is_not_loaded"),
    "test_keras_micro_batch_losses.py": (
        "several_outputs",
        "gets_the_update_of_the_full_batch[adam-False",
        "[clipped-",
        "[lion-",
        "denominators_that_differ[masked",
        "denominators_that_differ[sum",
        "an_embedding_gets",
    ),
    "test_keras_micro_batches.py": (
        "test_xla",
        *("optimizers[sgd-2", "optimizers[sgd-7", "optimizers[adam-2", "optimizers[adam-7", "optimizers[adamw"),
        *("weighted_metrics[on_weighted_classes-7", "weighted_metrics[on_weighted_samples-7", "regularisers[7"),
        *("optimizers[adafactor-3", "optimizers[lion-3"),
    ),
    "test_keras_recompute.py": ("masked_attention-graph", "mixed_precision-graph", "blocks-eager", "test_switches"),
    "test_keras_torch.py": ("eager_steps_to_the_bit[checkpoints", "rest_is_not[checkpoints in pieces"),
    "test_lower_bound.py": ("never_above_brute_force",),
    "test_oracles.py": ("[101-10]", "range(0, 40)"),
    "test_paddle_first_step.py": (
        "kept_as_zeros",
        "two_limited",
        "an_update_over",
        "a_larger_batch",
        "first_step[False",
    ),
    "test_private.py": ("asked_of_tensorflow",),
    "test_snippets.py": (
        *(f"coming-from.md-{number}]" for number in (6, 10, 12, 13)),
        *("keras_fit.py", "jax_training.py", "cluster_plan.py"),
    ),
    "test_tf_accumulate.py": ("a_budget_plans_each_iteration",),
    "test_tf_exact.py": (
        *("gradient_penalty", "integers", "ragged", "strings", "persistent_tape"),
        *("while_loop", "embedding", "conditional"),
    ),
    "test_tf_first_run.py": ("never_comes",),
    "test_tf_gradients_memory.py": ("u_net",),
    "test_tf_keras.py": ("test_fit_is_the_same",),
    "test_tf_models.py": ("",),
    "test_tf_optimized_graph.py": ("[residual", "[pooled"),
    "test_tf_no_counter.py": ("",),
    "test_tf_tape_errors.py": ("a_failed_plan_leaves", "stays_dynamic"),
    "test_tf_xla.py": ("what_xla_adds", "pooled_chain-4", "compiled_step_keeps"),
    "test_torch_models.py": ("gpt2-1%",),
}
"""Cases that ``make test`` leaves to ``make test-thorough``, by file and a part of their names: those that take longest
of several that assert the same."""

COUNTED = {
    "test_front_ends.py": tuple(
        f"tensorflow-{check}"
        for check in (
            "a_budget_is_kept",
            "a_saved_plan_is_followed",
            "a_budget_that_nothing_fits",
            "recompute_saves_memory",
            "the_environment_switches",
            "a_share_with_micro_batches",
        )
    ),
    "test_keras_beside.py": ("",),
    "test_keras_lengths.py": ("keep_the_budget", "takes_more"),
    "test_keras_first_step.py": ("",),
    "test_keras_micro_batch_memory.py": ("",),
    "test_keras_trace_model.py": ("nothing_is_allocated",),
    "test_tf_accumulate.py": ("one_micro_batch_at_a_time",),
    "test_tf_beside.py": ("beside", "captured_tensor", "micro_batches_count", "a_share_counts"),
    "test_tf_calls.py": ("takes_is_predicted", "a_budget_holds"),
    "test_tf_costs.py": ("half_precision_products",),
    "test_tf_cpu_scratch.py": ("axes_that_lie_apart",),
    "test_tf_first_run.py": ("says_what", "told_once", "raises_it", "never_comes", "measured_alike"),
    "test_tf_gradients_memory.py": ("",),
    "test_tf_in_place.py": ("",),
    "test_tf_loops.py": ("is_counted_and_exact",),
    "test_tf_models.py": ("",),
    "test_tf_one_by_one.py": ("",),
    "test_tf_ranks.py": ("keeps_its_budget", "one_process_breaks"),
    "test_tf_recompute_memory.py": ("",),
    "test_tf_replicas.py": ("each_device_keeps",),
    "test_tf_xla.py": ("keeps_its_budget", "what_a_call_allocates"),
}
"""Cases that read TensorFlow's own counter of CPU memory, by file and a part of their names: it is missing where oneDNN
is off. What remat does there is asserted by ``test_tf_no_counter.py`` and the cases marked ``other_cpu``."""

SEARCHED = ("benchmarks", "core", "planners")  # Folders whose tests are about what planners find.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_counter = os.environ["TF_ENABLE_ONEDNN_OPTS"] == "0"
    for item in items:
        if any(part in item.name for part in THOROUGH.get(item.path.name, ())):
            item.add_marker(pytest.mark.thorough)
        if without_counter and any(part in item.name for part in COUNTED.get(item.path.name, ())):
            item.add_marker(pytest.mark.skip(reason="reads TensorFlow's counter, which is missing: oneDNN is off"))


@pytest.fixture(autouse=True)
def smallest_peaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test waits for a search that it is not about."""
    from smallest_peaks import quickly_for_a_while

    if request.path.parent.name in SEARCHED:
        yield
    else:
        yield from quickly_for_a_while()


@pytest.fixture(autouse=True, scope="module")
def garbage_of_this_file_only() -> None:
    """What frameworks and earlier files left is not looked through again by every collection of garbage.

    remat collects garbage before it reads a counter. With TensorFlow alone in the process that takes .4 s.
    """
    gc.collect()
    gc.freeze()
