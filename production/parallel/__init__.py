"""Cut rows among ranks, shift them for multi-token prediction, and gather them again."""
