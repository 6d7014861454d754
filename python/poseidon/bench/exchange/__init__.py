"""`poseidon bench exchange`: the exchange alone, with infinitely fast compute."""
