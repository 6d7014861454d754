"""What transformers_trainer.py does, with updates that overlap."""

import torch

from poseidon.torch.hugging_face import OverlapCallback
from transformers_trainer import make_trainer, train

if __name__ == "__main__":
    trainer = make_trainer()
    trainer.add_callback(OverlapCallback(trainer))
    train(trainer)
    torch.distributed.destroy_process_group()
