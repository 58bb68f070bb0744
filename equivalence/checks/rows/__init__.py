"""Compare rows and batches of all sides, walk between presets, and hold both sides to recorded outcomes."""
