"""The backend `poseidon` of torch.distributed."""
