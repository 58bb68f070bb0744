"""Provide the command lines that a person runs."""
