"""The sample of real gradients: the trainings that it is taken from, and the page about it."""
