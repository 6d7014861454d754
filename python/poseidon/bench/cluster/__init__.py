"""`poseidon bench cluster`: what real machines do, beside what the planner says of them."""
