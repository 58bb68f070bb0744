"""Decide which row comes when, prepare batches in worker processes, and hand each step its microbatches."""
