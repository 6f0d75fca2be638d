"""Trains small models with other people's trainers, plain and within a budget, in a process of its own."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path

import torch

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


def tokens(count=24, length=64):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 128, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def hugging_face_trainer(folder, steps=4, accumulation=1, frozen=False, **more):
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
    return Trainer(model, arguments, train_dataset=tokens(), eval_dataset=tokens(8))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def hugging_face(accumulation=1, bf16=False, evaluates=False, resumes=False, frozen=False):
    """Weights after a few steps, plain and within 60 %; what the plan says and what was measured."""
    found = []
    for budget in (None, "60%"):
        with tempfile.TemporaryDirectory() as folder:
            more = {"eval_strategy": "steps", "eval_steps": 2} if evaluates else {}
            more |= {"bf16": bf16, "save_strategy": "steps" if resumes else "no", "save_steps": 2}
            trainer = hugging_face_trainer(folder, accumulation=accumulation, frozen=frozen, **more)
            limited = None if budget is None else remat.torch.trainers.limit_memory(trainer, budget, **QUICK)
            trainer.train()
            if resumes:
                trainer = hugging_face_trainer(folder, accumulation=accumulation, frozen=frozen, **more)
                limited = None if budget is None else remat.torch.trainers.limit_memory(trainer, budget, **QUICK)
                trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
            found.append(copy.deepcopy(trainer.model.state_dict()))
            if limited is not None:
                plan = limited.plans[0]
                limited.remove()
                answer = {
                    "plans": len(limited.plans),
                    "recomputed": plan.recomputed,
                    "budget": plan.budget_bytes,
                    "predicted": plan.peak_bytes,
                    "measured": plan.measured_peak_bytes,
                    "is_own": "compute_loss" not in vars(trainer),
                    "roles": sorted({plan.graph.tensors[n].role for n in plan.graph.inputs}),
                }
    return answer | {"same": same(*found)}


def lightning(accumulation=1, logs=True):
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

    found, losses = [], []
    for budget in (None, "70%"):
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
            )
            torch.manual_seed(5)
            loader = torch.utils.data.DataLoader(tokens(16), 4)
            trainer.fit(module, loader, torch.utils.data.DataLoader(tokens(4), 4))
        found.append(module.state_dict())
        losses.append([float(trainer.callback_metrics[name]) for name in ("loss_epoch", "validation")])
    plan = callbacks[0].plans[0]
    return {
        "same": same(*found) and losses[0] == losses[1],
        "plans": len(callbacks[0].plans),
        "recomputed": plan.recomputed,
        "budget": plan.budget_bytes,
        "predicted": plan.peak_bytes,
        "measured": plan.measured_peak_bytes,
        "is_own": not {"training_step", "log"} & vars(module).keys(),
        "roles": sorted({plan.graph.tensors[n].role for n in plan.graph.inputs}),
    }


def accelerate(accumulation=1, mixed=None):
    """The same with a loop of Accelerate's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    found = []
    for budget in (None, "60%"):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=mixed)
        model = tiny_llama()
        loader = torch.utils.data.DataLoader(tokens(16), 4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
        loss_fn = lambda batch: model(**batch).loss  # noqa: B023, E731
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
        found.append(copy.deepcopy(accelerator.unwrap_model(model).state_dict()))
    (plan,) = loss_fn.plans
    return {
        "same": same(*found),
        "plans": 1,
        "recomputed": plan.recomputed,
        "budget": plan.budget_bytes,
        "predicted": plan.peak_bytes,
        "measured": plan.measured_peak_bytes,
        "is_own": True,
        "roles": sorted({plan.graph.tensors[n].role for n in plan.graph.inputs}),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"hugging_face": hugging_face, "lightning": lightning, "accelerate": accelerate})
