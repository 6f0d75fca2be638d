"""Trains small models with other people's trainers, plain and within a budget, in a process of its own."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).parents[1]))
import remat.torch
from worker_process import serve

QUICK = {"planner": "peak_greedy", "time_limit_s": 0.2}


def tiny_llama(dropout=0.1):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def with_adapters(model):
    """LoRA of PEFT on the queries and values; everything else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def tokens(count=24, length=64):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 128, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def with_metrics(base):
    """A Trainer whose loss computes metrics beside it, as ``SFTTrainer`` of TRL 1.16 does it."""

    class Measuring(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._metrics = defaultdict(lambda: defaultdict(list))
            self._total_train_tokens = 0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            gathered = self.accelerator.gather_for_metrics
            with torch.no_grad():
                mask = inputs["labels"] != -100
                right = (outputs.logits.argmax(-1) == inputs["labels"]) & mask
            valid = gathered(mask.sum()).sum()
            correct = gathered(right.sum()).sum()
            self._metrics["train"]["accuracy"].append((correct / valid).item() if valid > 0 else 0.0)
            self._total_train_tokens += gathered(mask.sum()).sum().item()
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    return Measuring


def hugging_face_trainer(folder, steps=4, accumulation=1, frozen=False, lora=False, metrics=False, **more):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=1e-3,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **more,
    )
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "q_proj" in name)
    model = with_adapters(model) if lora else model
    kind = with_metrics(Trainer) if metrics else Trainer
    return kind(model, arguments, train_dataset=tokens(), eval_dataset=tokens(8))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def of_loop(train, budget="60%"):
    """What is asked of every trainer: does it train within a budget as it does without?

    Args:
        train: given the budget, or None, it trains a new model and returns its weights, the plans, and whether the
            trainer is its own again.
        budget: a share.
    """
    plain, _, _ = train(None)
    weights, plans, is_own = train(budget)
    plan = plans[0]
    return {
        "same": same(plain, weights),
        "plans": len(plans),
        "recomputed": plan.recomputed,
        "budget": plan.budget_bytes,
        "predicted": plan.peak_bytes,
        "measured": plan.measured_peak_bytes,
        "is_own": is_own,
        "roles": sorted({plan.graph.tensors[n].role for n in plan.graph.inputs}),
    }


def hugging_face(accumulation=1, bf16=False, evaluates=False, resumes=False, best=False, **kinds):
    """Weights after a few steps, plain and within 60 %; what the plan says and what was measured."""
    kinds |= {"accumulation": accumulation}
    saves = "steps" if resumes or best else "no"
    more = {"bf16": bf16, "save_strategy": saves, "save_steps": 2, "load_best_model_at_end": best}
    more |= {"eval_strategy": "steps", "eval_steps": 2} if evaluates else {}

    def train(budget):
        with folder_of_all() as folder:
            for checkpoint in (None, str(Path(folder) / "checkpoint-2"))[: 1 + resumes]:
                trainer = hugging_face_trainer(folder, **kinds, **more)
                limited = None if budget is None else remat.torch.trainers.limit_memory(trainer, budget, **QUICK)
                trainer.train(resume_from_checkpoint=checkpoint)
        return trained(trainer, limited)

    return of_loop(train)


@contextmanager
def folder_of_all():
    """A folder for checkpoints: that of rank 0, which alone writes them."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(folders)
        yield folders[0]
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def trained(trainer, limited):
    """What ``of_loop`` asks of a Trainer of transformers."""
    if limited is not None:
        limited.remove()
    weights = copy.deepcopy(trainer.model.state_dict())
    for name, said in getattr(trainer, "_metrics", {}).get("train", {}).items():
        weights[f"metrics.{name}"] = torch.tensor(said)
    is_own = "compute_loss" not in vars(trainer) and "gather_for_metrics" not in vars(trainer.accelerator)
    return weights, limited and limited.plans, is_own


def lightning(accumulation=1):
    """The same with Lightning's Trainer, whose module logs its loss."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_llama()

        def training_step(self, batch, batch_index):
            loss = self.model(**batch).loss
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_index):
            self.log("validation", self.model(**batch).loss)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    processes = int(os.environ.get("WORLD_SIZE", 1))
    spread = {"devices": processes, "strategy": "ddp"} if processes > 1 else {}

    def train(budget):
        callbacks = [] if budget is None else [remat.torch.trainers.lightning_callback(budget, **QUICK)]
        module = Module()
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                max_epochs=2,
                limit_train_batches=4,
                accumulate_grad_batches=accumulation,
                callbacks=callbacks,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                **spread,
            )
            torch.manual_seed(5)
            loader = torch.utils.data.DataLoader(tokens(16 * processes), 4)
            trainer.fit(module, loader, torch.utils.data.DataLoader(tokens(4), 4))
        logged = {name: trainer.callback_metrics[name] for name in ("loss_epoch", "validation")}
        is_own = not {"training_step", "log"} & vars(module).keys()
        return module.state_dict() | logged, callbacks and callbacks[0].plans, is_own

    return of_loop(train, "70%")


def accelerate(accumulation=1, mixed=None):
    """The same with a loop of Accelerate's."""
    return of_loop(lambda budget: train_with(accelerator_for(accumulation, mixed), accumulation, budget))


def accelerate_fsdp(accumulation, counted):
    """The same with Accelerate's FSDP2 plug-in, in one of several processes.

    Args:
        accumulation: micro-batches for each update.
        counted: a context that gives the names of collectives as they are called.
    """
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plans, calls = [], []

    def train(budget):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **blocks)
        accelerator = accelerator_for(accumulation, fsdp_plugin=plugin)
        # Accelerate turns the plug-in on where it finds an accelerator, and takes this for two processes of a CPU.
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        with counted() as called:
            weights, plans[:], is_own = train_with(accelerator, accumulation, budget)
        calls.append(Counter(called))
        assert accelerator.is_fsdp2
        return {name: one.to_local() for name, one in weights.items()}, plans, is_own

    found = of_loop(train, "70%")
    return found | {"calls": calls, "peaks": [[p.peak_bytes, p.measured_peak_bytes, p.budget_bytes] for p in plans]}


def accelerator_for(accumulation, mixed=None, **more):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=mixed, **more)


def train_with(accelerator, accumulation, budget, updates=5):
    """What ``of_loop`` asks of a loop of Accelerate's."""
    model = tiny_llama()
    loader = torch.utils.data.DataLoader(tokens(4 * updates * accumulation * accelerator.num_processes), 4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
    loss_fn = lambda batch: model(**batch).loss  # noqa: E731
    if budget is not None:
        options = {"optimizer": optimizer, "accumulates": accumulation > 1, "mode": "eager"}
        loss_fn = remat.torch.limit_memory(loss_fn, budget, **options, **QUICK)
    torch.manual_seed(5)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(batch))
            optimizer.step()
            optimizer.zero_grad()
    return copy.deepcopy(accelerator.unwrap_model(model).state_dict()), getattr(loss_fn, "plans", []), True


class WeightAverage(nn.Module):
    """As ``ModelEmaV3`` of timm 1.0 writes it, which needs torchvision."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model, step):
        pairs = list(zip(self.module.state_dict().values(), model.state_dict().values(), strict=True))
        for averaged, value in ((a, v) for a, v in pairs if not a.is_floating_point()):
            averaged.copy_(value)
        averaged, values = zip(*((a, v) for a, v in pairs if a.is_floating_point()), strict=True)
        torch._foreach_lerp_(averaged, values, weight=1.0 - self.decay)


def image_model():
    torch.manual_seed(0)
    channels = [3, 8, 16, 16, 16, 16, 16]
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.GELU())
        for a, b in pairwise(channels)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10))


def weight_average(kind="timm"):
    """A loop as timm's ``train.py`` has it: the loss in a function, clipping, an average of the weights."""
    x, y = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
    resident = []

    def train(budget):
        model = image_model()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if kind == "timm":
            average = WeightAverage(model)
            update = average.update
        else:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            update = lambda model, step: average.update_parameters(model)  # noqa: E731
        module = nn.parallel.DistributedDataParallel(model) if torch.distributed.is_initialized() else model
        own = loss_fn = lambda x, y: nn.functional.cross_entropy(module(x), y, label_smoothing=0.1)
        beside = [*average.module.parameters(), *average.module.buffers()]
        if budget is not None:
            options = {"optimizer": optimizer, "resident": beside, "mode": "eager"}
            loss_fn = remat.torch.limit_memory(loss_fn, budget, **options, **QUICK)
        torch.manual_seed(5)
        for step in range(4):
            module.train()
            loss_fn(x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            update(model, step=step)
            with torch.no_grad():
                loss_fn(x, y)
        plans = getattr(loss_fn, "plans", [])
        for plan in plans:
            alone = remat.torch.trace(own, x, y, optimizer=optimizer)
            counted = plan.graph.pinned_bytes - alone.pinned_bytes
            resident[:] = [counted, sum(one.numel() * one.element_size() for one in beside)]
        weights = copy.deepcopy(model.state_dict()) | {f"ema.{n}": v for n, v in average.state_dict().items()}
        return weights, plans, True

    return of_loop(train) | {"resident": resident}


def logged(trainer):
    """What a run of Weights & Biases, offline, says of the plan of each trainer; what the plan says."""
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, project="remat")
        try:
            if trainer == "hugging_face":
                # The module is the log: Trainer may open the run itself.
                made = hugging_face_trainer(folder, steps=2)
                limited = remat.torch.trainers.limit_memory(made, "60%", log_to=wandb, **QUICK)
                before = len(made.callback_handler.callbacks)
                made.train()
                limited.remove()
                plans, is_off = limited.plans, len(made.callback_handler.callbacks) == before - 1
            elif trainer == "lightning":
                plans, is_off = lightning_plans(run, folder), True
            else:
                plans, is_off = loop_plans(run), True
            if trainer != "loop":
                run.log({"after": 1})  # What a plan says comes with what is logged next.
            said = {name: value for name, value in dict(run.summary).items() if name.startswith("remat/")}
            steps = run.summary.get("_step", 0)
        finally:
            run.finish()
        # Another process writes the file, which may come behind the end of the run.
        end, written = time.monotonic() + 60, b""
        while not all(name.encode() in written for name in said) and time.monotonic() < end:
            (file,) = Path(folder).rglob("*.wandb")
            written = records_in(file.read_bytes())
            time.sleep(0.05)
    return {
        "said": said,
        "steps": steps,
        "written": all(name.encode() in written for name in said) and plans[0].planner.encode() in written,
        "plan": str(plans[0]),
        "budget": plans[0].budget_bytes,
        "predicted": plans[0].peak_bytes,
        "measured": plans[0].measured_peak_bytes,
        "is_off": is_off,
    }


def records_in(file):
    """What a file of Weights & Biases holds: LevelDB's log format, blocks of 32 KiB with a header for each part."""
    found, at = b"", 7
    while at + 7 <= len(file):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length = int.from_bytes(file[at + 4 : at + 6], "little")
        found += file[at + 7 : at + 7 + length]
        at += 7 + length
    return found


def lightning_plans(run, folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = image_model()

        def training_step(self, batch, batch_index):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    limit = remat.torch.trainers.lightning_callback("60%", log_to=run, **QUICK)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[limit], enable_model_summary=False, default_root_dir=folder, **quiet
    )
    data = torch.utils.data.TensorDataset(torch.randn(128, 3, 16, 16), torch.randint(10, (128,)))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, 64))
    return limit.plans


def loop_plans(run):
    model = image_model()
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    loss_fn = remat.torch.limit_memory(loss_fn, "60%", mode="eager", **QUICK)
    log = remat.torch.trainers.PlanLog(run)
    for step in range(3):
        loss = loss_fn(torch.randn(64, 3, 16, 16))
        loss.backward()
        log(loss_fn.plans)
        run.log({"loss": float(loss)}, step=step, commit=True)
    return loss_fn.plans


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["WANDB_SILENT"] = "true"
    found = (hugging_face, lightning, accelerate, weight_average, logged)
    serve({function.__name__: function for function in found})
