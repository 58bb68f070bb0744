"""Measure each part beside the part that it replaces, both in one run."""
