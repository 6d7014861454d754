"""The state from which a training step starts, so that training can go on after a failure."""
