"""Compare runs of many steps and whole runs of the training job with the reference's training loop."""
