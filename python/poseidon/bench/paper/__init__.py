"""`poseidon bench paper`: figures of the papers, predicted at full scale."""
