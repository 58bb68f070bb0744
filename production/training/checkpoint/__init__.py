"""Write, verify and load checkpoints, and hold the folders that a run writes to."""
