"""Describe a case of each kind as small JSON, and save, read, replay and promote cases."""
