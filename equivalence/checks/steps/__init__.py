"""Compare training steps on a real model with the reference and with Megatron-LM."""
