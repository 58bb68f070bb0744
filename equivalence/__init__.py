"""Generate cases and hold reference, production and the installed Megatron-LM to each other."""
