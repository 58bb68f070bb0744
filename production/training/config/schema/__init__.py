"""Declare the sections and keys of a job's configuration."""
