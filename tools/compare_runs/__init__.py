"""Compare two training runs step by step."""
