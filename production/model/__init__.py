"""Build megatron-core's model, and read and fill its weights by name."""
