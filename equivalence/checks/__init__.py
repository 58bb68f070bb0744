"""Compare the sides on one case: rows, input, cuts, training steps and runs."""
