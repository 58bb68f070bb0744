"""Judges packed rows by conformance levels, inside the environment of the code that packs them.

Decorate a packing function with `conformance`, and pytest has a test for each level and case (docs/conformance.md).
"""

from __future__ import annotations

from packproof.declared import Declared, conformance

__all__ = ["Declared", "conformance"]
