"""Keep other versions of Megatron-LM beside the installed one, each a subject of its own: megatron_lm@0.18.2."""
