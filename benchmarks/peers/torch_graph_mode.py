"""Graph mode beside ``apply``, checkpoints and Inductor: ``python -m benchmarks.peers.torch_graph_mode [MODEL ...]``.

Small configurations of transformers with random weights, each in a process of its own. All ways to run a step take
turns in it, and a figure is the median ratio of their processor times over ``ROUNDS`` rounds. "Extra" is the time of a
planned step beside graph mode's own with nothing recomputed; "predicted" is the same of both programs, their calls
timed one by one on this machine, those of views as well. "Start" is processor seconds of the first call: capture, plan
and, with Inductor, the compiler's, too, which finds nothing built before. What the second of Inductor's steps shares
with the first is built already. With models named, the others keep their lines from before. Writes
``benchmarks/results/torch-graph-mode.md`` and ``.json``.
"""

from __future__ import annotations

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
from unittest import mock

from remat.running import machine

ROUNDS = 15
RESULTS = Path(__file__).parent.parent / "results"
TITLE = "PyTorch: graph mode beside apply, checkpoints and Inductor, models of transformers, one thread"
CHECKPOINTS = ("checkpoint, each block", "selective checkpoint, products kept")
COMPILED = "torch.compile, memory budget 0.5"
PEERS = (*CHECKPOINTS, COMPILED)
INDUCTOR = f"Inductor, bytes of {COMPILED}"
BARE = "graph mode, nothing recomputed"
HEAD = "|---|---|---|---|---|---|---|---|"


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


def call_times(loss: Callable[[], Any]) -> dict[str, float]:
    """The least processor seconds of each call of graph mode's step with nothing recomputed, views among them."""
    import torch

    import remat.torch
    from remat.torch.graph_mode import _aot, capture

    least: dict[str, float] = {}

    def timed_function(module: Any, calls: Any, name: str) -> Any:
        class Timed(torch.fx.Interpreter):
            def run_node(self, node: Any) -> Any:
                if node.op != "call_function":
                    return super().run_node(node)
                function = calls.function_of(node)
                args, kwargs = self.fetch_args_kwargs_from_env(node)
                started = time.process_time()
                result = function(*args, **kwargs)
                took = time.process_time() - started
                least[node.name] = min(least.get(node.name, took), took)
                return result

        interpreter = Timed(module)

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            with _aot.below_autograd():
                return list(interpreter.run(*given))

        run.source = ""  # type: ignore[attr-defined]
        return run

    with mock.patch.object(capture, "function_of", timed_function):
        step = remat.torch.compile(loss, budget="100%", backend="aten")
        for _ in range(ROUNDS):
            step().backward()
    torch._dynamo.reset()
    return least


class Programs:
    """The programs of the plans that are made inside, and how long each is predicted to take.

    Args:
        least: seconds of each call.
    """

    def __init__(self, least: dict[str, float]) -> None:
        from remat.torch.graph_mode.candidate import GraphCandidate

        self._least = least
        self._seconds: list[float] = []
        own = GraphCandidate.program

        def program(candidate: GraphCandidate, plan: Any) -> Any:
            found = own(candidate, plan)
            # A call that runs again has a name of its own, and what it makes is that of the traced call.
            names = {id(node.meta["val"]): node.name for node in candidate._joint.graph.nodes if "val" in node.meta}
            made = [names.get(id(node.meta.get("val"))) for node in _calls_of(found[0])]
            self._seconds.append(sum(self._least.get(name, 0.0) for name in made if name is not None))
            return found

        self._patch = mock.patch.object(GraphCandidate, "program", program)

    def __enter__(self) -> Programs:
        self._patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()

    def seconds_of(self, step: Callable[[], Any]) -> float:
        """Of the program that a first call makes."""
        step()
        return self._seconds[-1]


def _calls_of(program: Any) -> list[Any]:
    return [
        node
        for module in (program.forward, program.backward)
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


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
    least = call_times(eager)

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

    with Programs(least) as programs:
        ways[BARE] = remat.torch.compile(unplanned, budget="100%", backend="aten")
        with Started() as started:
            bare_s = programs.seconds_of(ways[BARE])
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
                predicted = programs.seconds_of(step) / bare_s - 1
            plan = step.plan
            figures = {"roofline": plan.overhead, "predicted": predicted, "start_s": started.seconds}
            lines[f"graph mode, bytes of {peer}"] = figures
            ways[f"graph mode, bytes of {peer}"] = step

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
        if way.startswith("graph mode"):
            lines[way]["extra"] = statistics.median(one[way] / one[BARE] for one in rounds) - 1
        for one in models:
            one.zero_grad()
        lines[way]["peak_bytes"] = remat.torch.measure(step, repeats=1).peak_bytes
    return {"model": name, "lines": lines}


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
    where = machine.described()
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions().items())
    text = [
        f"# {TITLE}",
        "",
        f"{where['system']} {where['processor']}, {where['cores']} cores; {versions}.",
        "",
        "| model | method | peak MiB | against plain | extra: measured | predicted | to the bit | start, s |",
        HEAD,
    ]
    for one in tables:
        for name, line in one["lines"].items():
            if "error" in line:
                text.append(f"| {one['model']} | {name} | refused: {line['error']} | | | | | |")
                continue
            extra = f"{100 * line['extra']:.1f} %" if "extra" in line else ""
            said = f"{100 * line['predicted']:.1f} %" if "predicted" in line else ""
            same = "yes" if line["same"] else "no"
            start = f"{line['start_s']:.1f}" if "start_s" in line else ""
            figures = f"{line['peak_bytes'] / 2**20:.2f} | {line['ratio']:.2f} | {extra} | {said} | {same} | {start}"
            text.append(f"| {one['model']} | {name} | {figures} |")
    return "\n".join(text) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(table(sys.argv[2])))
        return
    file = RESULTS / "torch-graph-mode.json"
    tables = {one["model"]: one for one in json.loads(file.read_text())["tables"]} if file.exists() else {}
    for name in sys.argv[1:] or MODELS:
        command = [sys.executable, "-m", "benchmarks.peers.torch_graph_mode", "--one", name]
        with tempfile.TemporaryDirectory() as built:
            # One thread, so that the compiler's processes end with what they build, and count.
            variables = {"TORCHINDUCTOR_CACHE_DIR": built, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            environment = {**os.environ, **variables}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            print(f"{name} fails: {done.stderr[-1500:]}", flush=True)
            continue
        tables[name] = json.loads(done.stdout.splitlines()[-1])
        print(written([tables[name]]).partition(f"{HEAD}\n")[2], flush=True)
        found = [tables[model] for model in MODELS if model in tables]
        file.write_text(json.dumps({"title": TITLE, "tables": found}, indent=1) + "\n")
        file.with_suffix(".md").write_text(written(found))


if __name__ == "__main__":
    main()
