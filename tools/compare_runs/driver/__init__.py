"""Run Megatron-LM's own driver script, unmodified, and packproof's job on the same data, weights, layout and schedule."""
