"""Refuse configurations that must not run, with the key, the line and the fix."""
