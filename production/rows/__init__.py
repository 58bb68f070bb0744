"""Build one packed row from its conversations, and collate rows into guarded batches."""
