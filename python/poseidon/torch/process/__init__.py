"""This process's place in its jobs, and collectives of the training script."""
