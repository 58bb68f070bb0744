"""Measures the conformance levels of other projects' packing, each in an environment of its own."""
