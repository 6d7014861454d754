"""What a training step starts from, to go on after a failure."""
