"""Run training steps and whole runs on production and on Megatron-LM's own pieces."""
