"""Compute with the reference what a training step and a whole run must give."""
