"""Takes gradients from the hooks of a backward pass to the client, and the results back."""
