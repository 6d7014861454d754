"""Hugging Face's Trainer on a tiny GPT-2: accumulation, clipping, the default optimizer, evaluation between.

transformers_trainer.py FOLDER
"""

import os
import sys

import torch
import transformers
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from results import save, text

BLOCK, SYMBOLS = 12, 31


class Text(torch.utils.data.Dataset):
    def __init__(self, count):
        self.data = text(count * BLOCK, SYMBOLS)

    def __len__(self):
        return len(self.data) // BLOCK

    def __getitem__(self, index):
        tokens = self.data[index * BLOCK : (index + 1) * BLOCK]
        return {"input_ids": tokens, "labels": tokens}


def make_trainer():
    transformers.logging.set_verbosity_error()
    transformers.set_seed(3)
    config = GPT2Config(
        vocab_size=SYMBOLS,
        n_positions=BLOCK,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=os.path.join(sys.argv[1], "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=3e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Text(64), eval_dataset=Text(9))


def train(trainer):
    """Trains, and again: the second call goes on with the optimizer of the first."""
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step == 6
    saved = load_file(os.path.join(trainer.args.output_dir, "checkpoint-3", "model.safetensors"))
    save({**trainer.model.state_dict(), **{f"saved.{name}": tensor for name, tensor in saved.items()}})


if __name__ == "__main__":
    train(make_trainer())
    torch.distributed.destroy_process_group()
