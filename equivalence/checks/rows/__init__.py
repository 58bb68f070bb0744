"""Compare rows and batches of all sides, walk between presets, and compare both sides with recorded outcomes."""
