"""Tokenize ordinary chat conversations and pack them into bins during training."""
