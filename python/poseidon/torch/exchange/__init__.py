"""From the hooks of a backward pass to the client and back."""
