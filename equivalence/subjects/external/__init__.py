"""Subjects outside the process: `exec:"PYTHON my_adapter.py"` runs an adapter in its own environment (docs/protocol.md)."""
