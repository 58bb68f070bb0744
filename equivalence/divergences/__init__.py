"""Predict how two values of one field of Semantics differ on a row."""
