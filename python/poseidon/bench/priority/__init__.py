"""`poseidon bench priority`: what priorities do, and what they cost."""
