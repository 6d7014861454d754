"""Hugging Face's Trainer on a tiny GPT-2 with dropout, in a job whose workers may be killed.

transformers_recovery.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import transformers

import poseidon.torch as poseidon
from poseidon.torch.hugging_face import RecoveryCallback, init_alone

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from killed_runs import answer, digest, note

BLOCK, SYMBOLS = 12, 31


class Text(torch.utils.data.Dataset):
    """Tokens, some of which are drawn when an example is loaded."""

    def __init__(self, count):
        self.data = torch.randint(SYMBOLS, (count, BLOCK), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        tokens = self.data[index].clone()
        tokens[torch.randint(BLOCK, ())] = 3
        labels = tokens.clone()
        labels[: index % 5] = -100  # so that batches have different numbers of tokens
        return {"input_ids": tokens, "labels": labels}


class Noting(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        note(state.global_step)


def main():
    init_alone()
    transformers.logging.set_verbosity_error()
    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=SYMBOLS, n_positions=BLOCK, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(sys.argv[1], "trainer"),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=6,
        learning_rate=3e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=7,
        save_strategy="steps",
        save_steps=7,
        logging_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to=[],
        disable_tqdm=True,
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Text(200), eval_dataset=Text(9))
    trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=50))
    callback = RecoveryCallback(trainer)
    trainer.add_callback(callback)
    trainer.add_callback(Noting())
    done = trainer.train()
    values = [tensor.numpy() for tensor in model.state_dict().values()]
    state = trainer.optimizer.optimizer.state_dict()["state"]
    values += [part.numpy() for one in state.values() for part in one.values()]
    answer(
        poseidon.rank(),
        {
            "digest": digest(values),
            "failures": len(callback.recovery.history),
            "steps": done.global_step,
            "best": trainer.state.best_metric,
            "lr": trainer.lr_scheduler.get_last_lr(),
        },
    )


if __name__ == "__main__":
    main()
