"""Graph mode beside ``apply``, checkpoints and Inductor: ``python -m benchmarks.peers.torch_graph_mode [MODEL ...]``.

With ``--extra`` only the extra times of lines that are there are measured anew.

Small configurations of transformers with random weights, each in a process of its own. All ways to run a step take
turns in it, and a figure is the median ratio of their processor times over ``ROUNDS`` rounds. "Extra" is the time of a
planned step beside graph mode's own with nothing recomputed; "predicted" is ``plan.expected_overhead`` with
``device="measured"``: each call timed by itself, and what a schedule has in caches. Both are medians of ``PROCESSES``
further processes, in which only graph mode's steps take turns: where a process happens to put its memory moves them by
some points. glibc gives free memory back to the system, and the system clears it page by page when it is asked for
again, which no prediction counts; in these processes it gives nothing back. "Operators alone" is ``plan.overhead``.
"Start" is processor seconds of the first call: capture, plan and, with Inductor, the compiler's, too, which finds
nothing built before. What the second of Inductor's steps shares with the first is built already. With models named, the
others keep their lines from before. Writes ``benchmarks/results/torch-graph-mode.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.where import here

ROUNDS = 15
PROCESSES = 3
KEEPING = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
"""Of glibc: free memory stays with the process."""
RESULTS = Path(__file__).parent.parent / "results"
TITLE = "PyTorch: graph mode beside apply, checkpoints and Inductor, models of transformers, one thread"
CHECKPOINTS = ("checkpoint, each block", "selective checkpoint, products kept")
COMPILED = "torch.compile, memory budget 0.5"
PEERS = (*CHECKPOINTS, COMPILED)
INDUCTOR = f"Inductor, bytes of {COMPILED}"
BARE = "graph mode, nothing recomputed"
PLANNED = "graph mode, bytes of "
HEAD = "|---|---|---|---|---|---|---|---|---|"


def gpt2() -> tuple[Any, Callable[[Any], Any], list[Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=1024, n_positions=128, use_cache=False)
    ids = torch.randint(1024, (8, 128))
    model = GPT2LMHeadModel(config)
    return model, lambda model: model(input_ids=ids, labels=ids).loss, list(model.transformer.h)


def clip() -> tuple[Any, Callable[[Any], Any], list[Any]]:
    import torch
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 1000, "max_position_embeddings": 32, "eos_token_id": 999}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 64, "patch_size": 8}))
    ids, images = torch.randint(1, 1000, (16, 32)), torch.randn(16, 3, 64, 64)
    blocks = [*model.text_model.encoder.layers, *model.vision_model.encoder.layers]
    return model, lambda model: model(input_ids=ids, pixel_values=images, return_loss=True).loss, blocks


def whisper() -> tuple[Any, Callable[[Any], Any], list[Any]]:
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = WhisperConfig(
        **sizes,
        vocab_size=1000,
        d_model=128,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        num_mel_bins=40,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    sound, labels = torch.randn(8, 40, 200), torch.randint(3, 1000, (8, 32))
    model = WhisperForConditionalGeneration(config)
    blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
    return model, lambda model: model(input_features=sound, labels=labels).loss, blocks


def segformer() -> tuple[Any, Callable[[Any], Any], list[Any]]:
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation
    from transformers.models.segformer.modeling_segformer import SegformerLayer

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=10, decoder_hidden_size=64))
    images, labels = torch.randn(2, 3, 96, 96), torch.randint(10, (2, 96, 96))
    blocks = [module for module in model.modules() if isinstance(module, SegformerLayer)]
    return model, lambda model: model(pixel_values=images, labels=labels).loss, blocks


def mamba() -> tuple[Any, Callable[[Any], Any], list[Any]]:
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=3, state_size=8, use_cache=False)
    )
    ids = torch.randint(500, (4, 32))
    return model, lambda model: model(input_ids=ids, labels=ids).loss, list(model.backbone.layers)


MODELS = {"GPT-2": gpt2, "CLIP": clip, "Whisper": whisper, "Segformer": segformer, "Mamba": mamba}


def wrapped(model: Any, blocks: list[Any], selective: bool) -> Any:
    """A copy of a model whose blocks are checkpointed."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}
    products.add(aten._scaled_dot_product_flash_attention_for_cpu.default)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if func in products else CheckpointPolicy.PREFER_RECOMPUTE

    more = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if selective else {}
    places = [name for name, module in model.named_modules() if any(module is block for block in blocks)]
    found = copy.deepcopy(model)
    for place in places:
        block = found.get_submodule(place)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    return found


def compiled(loss_of: Callable[[Any], Any], model: Any) -> Callable[[], Any]:
    """Inductor's step, with its own budget for activations."""
    import torch
    import torch._functorch.config

    with torch._functorch.config.patch(activation_memory_budget=0.5):
        step = torch.compile(lambda: loss_of(model), dynamic=False)
        step().backward()
    return step


def without_draws(name: str) -> Any:
    """A model that draws nothing, its loss and its blocks, in a process with one thread.

    What recomputation costs is compared; random draws have tests of their own.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of, blocks = MODELS[name]()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, loss_of, blocks


def table(name: str) -> dict[str, Any]:
    """All lines of one model."""
    import torch

    import remat
    import remat.torch

    model, loss_of, blocks = without_draws(name)
    loss = partial(loss_of, model)

    def eager() -> Any:
        return loss()

    eager().backward()  # What a library imports and looks up at its first call cannot be captured.

    ways: dict[str, Callable[[], Any]] = {"plain": eager}
    models = [model]
    lines: dict[str, dict[str, Any]] = {}
    for peer, selective in zip(CHECKPOINTS, (False, True), strict=True):
        models.append(wrapped(model, blocks, selective))
        ways[peer] = partial(loss_of, models[-1])
    with Started() as started:
        ways[COMPILED] = compiled(loss_of, model)
    lines[COMPILED] = {"start_s": started.seconds}

    def unplanned() -> Any:
        return loss()

    ways[BARE] = remat.torch.compile(unplanned, budget="100%", backend="aten")
    with Started() as started:
        ways[BARE]()
    lines[BARE] = {"start_s": started.seconds}
    for peer in PEERS:
        for one in models:
            one.zero_grad()
        budget = remat.torch.measure(ways[peer], repeats=1).peak_bytes

        def captured() -> Any:
            return loss()

        try:
            found = remat.torch.plan(eager, budget=budget, time_limit_s=4)
        except remat.InfeasibleBudget as error:
            lines[f"apply, bytes of {peer}"] = {"error": f"smallest {error.minimum_bytes}"}
        else:
            ways[f"apply, bytes of {peer}"] = partial(within, remat.torch.apply(found), eager)
        step = remat.torch.compile(captured, budget=budget, backend="aten", time_limit_s=4)
        with Started() as started:
            step()
        assert step.plan is not None
        lines[PLANNED + peer] = {"roofline": step.plan.overhead, "start_s": started.seconds}
        ways[PLANNED + peer] = step

    def built() -> Any:
        return loss()

    for one in models:
        one.zero_grad()
    budget = remat.torch.measure(ways[COMPILED], repeats=1).peak_bytes
    step = remat.torch.compile(built, budget=budget, time_limit_s=4)
    try:
        with Started() as started:
            step().backward()
    except remat.InfeasibleBudget as error:
        lines[INDUCTOR] = {"error": f"smallest {error.minimum_bytes}"}
    else:
        figures = {"roofline": step.plan.overhead, "predicted_bytes": step.plan.peak_bytes}
        lines[INDUCTOR] = {**figures, "planner": step.plan.planner, "start_s": started.seconds}
        ways[INDUCTOR] = step

    def gradients(way: Callable[[], Any]) -> list[Any]:
        for one in models:
            one.zero_grad()
        torch.manual_seed(7)
        way().backward()
        used = next(one for one in models if any(p.grad is not None for p in one.parameters()))
        return [p.grad for p in used.parameters()]

    def seconds(way: Callable[[], Any]) -> float:
        for one in models:
            one.zero_grad()
        started = time.process_time()
        way().backward()
        return time.process_time() - started

    expected = gradients(eager)
    for way, step in ways.items():
        found_gradients = gradients(step)
        same = all(a is b or torch.equal(a, b) for a, b in zip(expected, found_gradients, strict=True))
        lines[way] = {**lines.get(way, {}), "same": same}
    rounds = [{way: seconds(step) for way, step in ways.items()} for _ in range(ROUNDS)]
    for way, step in ways.items():
        own = [one[way] for one in rounds]
        lines[way]["step_s"] = statistics.median(own)
        lines[way]["ratio"] = statistics.median(one[way] / one["plain"] for one in rounds)
        for one in models:
            one.zero_grad()
        lines[way]["peak_bytes"] = remat.torch.measure(step, repeats=1).peak_bytes
    return {"model": name, "lines": lines}


def extra_times(name: str, budgets: dict[str, int]) -> dict[str, dict[str, float]]:
    """Predicted and measured extra time of graph mode within each budget, of one process."""
    import remat.torch

    model, loss_of, _ = without_draws(name)
    loss = partial(loss_of, model)
    loss().backward()

    def seconds(step: Callable[[], Any]) -> float:
        model.zero_grad()
        started = time.process_time()
        step().backward()
        return time.process_time() - started

    def unplanned() -> Any:
        return loss()

    within_bytes = partial(remat.torch.compile, backend="aten", device="measured", time_limit_s=4)
    bare, steps, found = within_bytes(unplanned, budget="100%"), {}, {}
    seconds(bare)
    for peer, budget in budgets.items():

        def captured() -> Any:
            return loss()

        steps[peer] = within_bytes(captured, budget=budget)
        seconds(steps[peer])
        plan = steps[peer].plan
        found[peer] = {"predicted": plan.expected_overhead, "operators alone": plan.overhead}
    for step in (bare, *steps.values()):
        seconds(step)
    rounds = []
    for _ in range(ROUNDS):
        bare_now_s = seconds(bare)
        rounds.append({peer: seconds(step) / bare_now_s - 1 for peer, step in steps.items()})
    for peer, figures in found.items():
        figures["extra"] = statistics.median(one[peer] for one in rounds)
    return found


class Started:
    """Processor seconds of what is done inside, those of a compiler's processes counted."""

    def __enter__(self) -> Started:
        self._since = sum(os.times()[:4])
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = sum(os.times()[:4]) - self._since


def within(context: Any, loss: Callable[[], Any]) -> Any:
    with context:
        return loss()


def written(tables: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    text = [
        f"# {TITLE}",
        "",
        f"{here()}.",
        "",
        "| model | method | peak MiB | against plain | extra: measured | predicted | operators alone | to the bit "
        "| start, s |",
        HEAD,
    ]
    for one in tables:
        for name, line in one["lines"].items():
            if "error" in line:
                text.append(f"| {one['model']} | {name} | refused: {line['error']} | | | | | | |")
                continue
            extra = " | ".join(_range(line, what) for what in ("extra", "predicted", "operators alone"))
            same = "yes" if line["same"] else "no"
            start = f"{line['start_s']:.1f}" if "start_s" in line else ""
            figures = f"{line['peak_bytes'] / 2**20:.2f} | {line['ratio']:.2f} | {extra} | {same} | {start}"
            text.append(f"| {one['model']} | {name} | {figures} |")
    return "\n".join(text) + "\n"


def _range(line: dict[str, Any], what: str) -> str:
    """The median, the least and the most of what several processes found."""
    found = [100 * one[what] for one in line.get("processes", [])]
    return f"{statistics.median(found):.1f} % ({min(found):.1f} to {max(found):.1f})" if found else ""


def with_extra_times(found: dict[str, Any]) -> None:
    """Have processes measure the extra times of a model's lines, and note them there."""
    lines = {peer: found["lines"][PLANNED + peer] for peer in PEERS if "error" not in found["lines"][PLANNED + peer]}
    budgets = json.dumps({peer: found["lines"][peer]["peak_bytes"] for peer in lines})
    for line in lines.values():
        line["processes"] = []
    command = [sys.executable, "-m", "benchmarks.peers.torch_graph_mode", found["model"], "--times", budgets]
    environment = {**os.environ, **KEEPING, "REMAT_PLAN_CACHE": "off"}
    for _ in range(PROCESSES):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for peer, figures in json.loads(done.stdout.splitlines()[-1]).items():
            lines[peer]["processes"].append(figures)


def measured(name: str) -> dict[str, Any] | None:
    """The lines of one model, from a process of its own; None where that fails."""
    command = [sys.executable, "-m", "benchmarks.peers.torch_graph_mode", "--one", name]
    with tempfile.TemporaryDirectory() as built:
        # One thread, so that the compiler's processes end with what they build, and count.
        variables = {"TORCHINDUCTOR_CACHE_DIR": built, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment = {**os.environ, **variables}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(f"{name} fails: {done.stderr[-1500:]}", flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is named")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--extra", action="store_true", help="measure extra times of lines that are there")
    what.add_argument("--one", action="store_true", help="the lines of one model, here, as JSON")
    what.add_argument("--times", type=json.loads, metavar="BUDGETS", help="extra times of one model, here, as JSON")
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in MODELS]:
        parser.error(f"there is no model {', '.join(unknown)}: take some of {', '.join(MODELS)}")
    if asked.one or asked.times is not None:
        if len(asked.models) != 1:
            parser.error(f"--one and --times take one model, and there are {len(asked.models)}")
        (name,) = asked.models
        print(json.dumps(table(name) if asked.one else extra_times(name, asked.times)))
        return
    file = RESULTS / "torch-graph-mode.json"
    tables = {one["model"]: one for one in json.loads(file.read_text())["tables"]} if file.exists() else {}
    for name in asked.models or MODELS:
        found = tables.get(name) if asked.extra else measured(name)
        if found is None:
            continue
        with_extra_times(found)
        tables[name] = found
        print(written([found]).partition(f"{HEAD}\n")[2], flush=True)
        kept = [tables[model] for model in MODELS if model in tables]
        file.write_text(json.dumps({"title": TITLE, "tables": kept}, indent=1) + "\n")
        file.with_suffix(".md").write_text(written(kept))


if __name__ == "__main__":
    main()
