"""`poseidon bench paper`: headline figures of the papers, predicted at full scale."""
