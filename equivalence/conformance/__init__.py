"""Connects the conformance levels of `packproof` with the suite: witnesses as packing functions, and the test vectors' generator."""
