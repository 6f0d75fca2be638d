"""Hugging Face's Trainer within a byte budget, by one line: `python examples/huggingface_trainer.py 60%`."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat.torch

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, n_positions=128, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(512, (32, 128))
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=2, logging_steps=1, report_to=[], save_strategy="no"
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    limited = remat.torch.trainers.limit_memory(trainer, sys.argv[1] if sys.argv[1:] else "60%")
    trainer.train()
    print(limited.plans[0])
