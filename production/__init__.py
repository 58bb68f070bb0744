"""Build packed rows at speed and train on them with megatron-core."""
