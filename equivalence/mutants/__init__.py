"""Faults put into production on purpose, each one that has really happened; every one must be found."""
