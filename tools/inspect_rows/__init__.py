"""Inspect whole packed files: every row built, every refusal and loss with its place."""
