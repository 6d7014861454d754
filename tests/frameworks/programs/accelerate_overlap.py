"""What accelerate_loop.py does, with updates that overlap."""

from accelerate_loop import train
from poseidon.torch.hugging_face import overlap

if __name__ == "__main__":
    train(prepared=lambda model, optimizer: overlap(optimizer, model))
