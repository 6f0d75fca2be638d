"""Graph mode beside ``apply`` and checkpoints, on five models: ``python -m benchmarks.peers.torch_graph_mode [MODEL]``.

Small configurations of transformers with random weights, each in a process of its own. All ways to run a step take
turns in it, and a figure is the median ratio of their processor times over ``ROUNDS`` rounds. "Extra" is the time of a
planned step beside graph mode's own with nothing recomputed; "predicted" is the same of the plan, its operators timed
one by one on this machine, once with what it takes to make views and once without. Compiled peers are not equal to the
bit: their kernels are others. Writes ``benchmarks/results/torch-graph-mode.md`` and ``.json``.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from remat.running import machine

ROUNDS = 15
RESULTS = Path(__file__).parent.parent / "results"
TITLE = "PyTorch: graph mode beside apply and checkpoints, models of transformers, one thread"
PEERS = ("checkpoint, each block", "selective checkpoint, products kept")
COMPILED = {"torch.compile": 1.0, "torch.compile, activation_memory_budget 0.5": 0.5}


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


class TimedPrograms:
    """Both passes of captured steps, run operator by operator: the least processor seconds of each kind of call.

    Two calls are of one kind if they run one operator on tensors of the same shapes and strides. Calls that make views
    are timed, too: a plan says that they are free, and in a model of small operators they are not.
    """

    def __init__(self) -> None:
        self.least: dict[Any, float] = {}
        self._clock_s = min(-time.process_time() + time.process_time() for _ in range(1000))

    def calls_of(self, loss: Callable[[], Any], **options: Any) -> list[tuple[Any, bool]]:
        """The kinds of the calls of a step within a budget or under a plan, each with: does it make a view?"""
        import torch

        import remat.torch
        from remat.torch.graph_mode import _aot, capture, nodes

        found: list[tuple[Any, bool]] = []
        least, clock_s = self.least, self._clock_s

        def kind_of(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return [(tuple(one.shape), one.stride(), str(one.dtype)) for one in nodes.tensors_of(value)]
            return [kind_of(one) for one in value] if isinstance(value, list | tuple) else value

        def timed_function(module: Any, calls: Any, name: str) -> Any:
            kinds = {}
            for node in module.graph.nodes:
                if node.op == "call_function" and not nodes.is_part(node):
                    target = getattr(node.target, "__name__", str(node.target))
                    kinds[node] = f"{target} {kind_of(node.args)} {sorted(node.kwargs)}"
                    found.append((kinds[node], nodes.is_view(node)))

            class Timed(torch.fx.Interpreter):
                def run_node(self, node: Any) -> Any:
                    if node not in kinds:
                        return super().run_node(node)
                    function = calls.function_of(node)
                    args, kwargs = self.fetch_args_kwargs_from_env(node)
                    started = time.process_time()
                    result = function(*args, **kwargs)
                    took = max(0.0, time.process_time() - started - clock_s)
                    least[kinds[node]] = min(least.get(kinds[node], took), took)
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
            step: Any = remat.torch.compile(of_its_own(loss), backend="aten", **options)
            for _ in range(ROUNDS):
                step().backward()
        return found

    def seconds(self, calls: list[tuple[Any, bool]], *, views: bool = True) -> float:
        """What calls take, each as long as the quickest of its kind."""
        return sum(self.least[kind] for kind, is_view in calls if views or not is_view)


def of_its_own(loss: Callable[[], Any]) -> Callable[[], Any]:
    """The function with a code object of its own: Dynamo counts captures by these."""

    def captured() -> Any:
        return loss()

    code = captured.__code__.replace()
    return types.FunctionType(code, captured.__globals__, closure=captured.__closure__)


def table(name: str) -> dict[str, Any]:
    """All lines of one model."""
    import torch
    import torch._functorch.config

    import remat
    import remat.torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of, blocks = MODELS[name]()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # What recomputation costs is compared; random draws have tests of their own.
    loss = partial(loss_of, model)

    def eager() -> Any:
        return loss()

    eager().backward()  # What a library imports and looks up at its first call cannot be captured.
    timed = TimedPrograms()
    plain_calls = timed.calls_of(eager, budget="100%")

    ways: dict[str, Callable[[], Any]] = {"plain": eager}
    models = [model]
    lines: dict[str, dict[str, Any]] = {}
    for peer, selective in zip(PEERS, (False, True), strict=True):
        models.append(wrapped(model, blocks, selective))
        ways[peer] = partial(loss_of, models[-1])
    for peer, share in COMPILED.items():
        ways[peer] = of_its_own(loss)
        with torch._functorch.config.patch(activation_memory_budget=share):
            ways[peer] = torch.compile(ways[peer], dynamic=False)
            ways[peer]().backward()
    planned_calls = {}
    for peer in (*PEERS, *COMPILED):
        budget = remat.torch.measure(ways[peer], repeats=1).peak_bytes
        try:
            found = remat.torch.plan(eager, budget=budget, time_limit_s=4)
        except remat.InfeasibleBudget as error:
            lines[f"apply, bytes of {peer}"] = {"error": f"smallest {error.minimum_bytes}"}
        else:
            ways[f"apply, bytes of {peer}"] = partial(within, remat.torch.apply(found), eager)
        step: Any = remat.torch.compile(of_its_own(loss), budget=budget, backend="aten", time_limit_s=4)
        try:
            step()
        except remat.InfeasibleBudget as error:
            lines[f"graph mode, bytes of {peer}"] = {"error": f"smallest {error.minimum_bytes}"}
            continue
        way = f"graph mode, bytes of {peer}"
        lines[way] = {"roofline": step.plan.overhead}
        planned_calls[way] = timed.calls_of(loss, plan=step.plan)
        ways[way] = step
    for way, calls in planned_calls.items():
        lines[way]["predicted"] = timed.seconds(calls) / timed.seconds(plain_calls) - 1
        without = timed.seconds(calls, views=False) / timed.seconds(plain_calls, views=False)
        lines[way]["predicted, views free"] = without - 1

    ways["graph mode, nothing recomputed"] = remat.torch.compile(of_its_own(loss), budget="100%", backend="aten")

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
            bare = "graph mode, nothing recomputed"
            lines[way]["extra"] = statistics.median(one[way] / one[bare] for one in rounds) - 1
        for one in models:
            one.zero_grad()
        lines[way]["peak_bytes"] = remat.torch.measure(step, repeats=1).peak_bytes
    return {"model": name, "lines": lines}


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
        "| model | method | peak MiB | against plain | extra: measured | predicted | views free | to the bit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in tables:
        for name, line in one["lines"].items():
            if "error" in line:
                text.append(f"| {one['model']} | {name} | refused: {line['error']} | | | | | |")
                continue
            extra = f"{100 * line['extra']:.1f} %" if "extra" in line else ""
            said, views_free = (
                f"{100 * line[kind]:.1f} %" if kind in line else "" for kind in ("predicted", "predicted, views free")
            )
            same = "yes" if line["same"] else "no"
            figures = (
                f"{line['peak_bytes'] / 2**20:.2f} | {line['ratio']:.2f} | {extra} | {said} | {views_free} | {same}"
            )
            text.append(f"| {one['model']} | {name} | {figures} |")
    return "\n".join(text) + "\n"


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(table(sys.argv[1])))
        return
    tables = []
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.peers.torch_graph_mode", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name} fails: {done.stderr[-500:]}", flush=True)
            continue
        tables.append(json.loads(done.stdout.splitlines()[-1]))
        print(written(tables[-1:]).partition("|---|---|---|---|---|---|---|---|\n")[2], flush=True)
    (RESULTS / "torch-graph-mode.json").write_text(json.dumps({"title": TITLE, "tables": tables}, indent=1) + "\n")
    (RESULTS / "torch-graph-mode.md").write_text(written(tables))


if __name__ == "__main__":
    main()
