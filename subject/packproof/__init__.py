"""Judges packed rows by conformance levels, inside the environment of the code that packs them."""
