"""What recovery in other loops refuses, as one object of JSON: recovery_refusals.py FOLDER."""

import json
import sys

import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import poseidon.torch as poseidon
from poseidon.torch.hugging_face import RecoveryCallback, init_alone, recovery_of
from poseidon.torch.lightning import RecoveryStrategy

TOKENS = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(20, (12, 6))]
DATA = TensorDataset(torch.randn(12, 4))


def refusal(act):
    try:
        act()
    except poseidon.PoseidonError as error:
        return str(error)
    return "nothing was refused"


def trainer(kind=transformers.Trainer, **options):
    arguments = transformers.TrainingArguments(
        sys.argv[1], use_cpu=True, max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, **options
    )
    size = {"vocab_size": 20, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    made = kind(model, arguments, train_dataset=TOKENS)
    made.add_callback(RecoveryCallback(made))
    return made


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=2)


class OwnSampler(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return RandomSampler(self.train_dataset, replacement=True)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class NoLoss(Net):
    def training_step(self, batch, index):
        return None if index == 1 else super().training_step(batch, index)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def fit(loaders, module=Net, **options):
    made = Trainer(
        strategy=RecoveryStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    made.fit(module(), loaders)


def loop_with_a_loader():
    accelerator = Accelerator(cpu=True)
    model = poseidon.DistributedDataParallel(torch.nn.Linear(4, 1))
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(DATA))
    recovery_of(accelerator)


def main():
    init_alone()
    transformers.logging.set_verbosity_error()
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    some = DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, num_samples=4))
    found = {
        "own loader": refusal(lambda: trainer(OwnLoader).train()),
        "own sampler": refusal(lambda: trainer(OwnSampler).train()),
        "by length": refusal(lambda: trainer(train_sampling_strategy="group_by_length")),
        "several loaders": refusal(lambda: fit([loader, DataLoader(DATA, batch_size=3)])),
        "some examples": refusal(lambda: fit(some)),
        "average of weights": refusal(lambda: fit(loader, callbacks=[EMAWeightAveraging()])),
        "no loss": refusal(lambda: fit(loader, NoLoss)),
        "manual": refusal(lambda: fit(loader, Manual)),
        "prepared loader": refusal(loop_with_a_loader),
    }
    print("REFUSALS " + json.dumps(found))


if __name__ == "__main__":
    main()
