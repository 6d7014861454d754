"""Gradients for replays, with the exponents that were seen in real ones."""
