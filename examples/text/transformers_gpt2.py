"""Transformers' Trainer and a small GPT-2 made from a configuration: one callback more. Nothing is downloaded; the text
is Python's own documentation, character by character.

python examples/text/transformers_gpt2.py
"""

import math
import pydoc_data.topics
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from smoothout import schedule
from smoothout.integrations.transformers import SmoothOutCallback

LENGTH, STEPS = 32, 120

topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))[:100_000].lower()
alphabet = sorted(set(topics))
text = torch.tensor([alphabet.index(c) for c in topics])


def windows(text):
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(alphabet), n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
# Noise per filter: columns of GPT-2's `Conv1D`, rows of the embedding, which is tied to the output; no LayerNorm.
smooth = SmoothOutCallback(0.05, scale="filter", schedule=schedule.Warmup(STEPS // 10))

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            gradient_accumulation_steps=2,  # both micro-batches at one θ
            learning_rate=3e-3,
            warmup_steps=STEPS // 10,
            eval_strategy="steps",
            eval_steps=STEPS // 2,  # at the clean weights
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=windows(text[:-5_000]),
        eval_dataset=windows(text[-5_000:]),
        callbacks=[smooth],
    )
    before = trainer.evaluate()["eval_loss"] / math.log(2)
    trainer.train()
    after = trainer.evaluate()["eval_loss"] / math.log(2)
print(smooth.smooth.summary())
print(f"test bits per character {before:.2f} before, {after:.2f} after {smooth.smooth.step_count} steps")
