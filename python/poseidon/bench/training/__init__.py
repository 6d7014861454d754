"""`poseidon bench train`: replayed training with several methods."""
