"""Add, list, remove and compare witnesses of other versions."""
