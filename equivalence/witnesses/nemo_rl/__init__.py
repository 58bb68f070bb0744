"""NeMo-RL's own, unmodified modules as a witness, from a checkout; without a checkout its recorded outcomes stand in its place."""
