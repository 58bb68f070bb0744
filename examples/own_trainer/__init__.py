"""The direct path in trainers that are not packproof's; docs/guides/own-trainer.md goes through them."""
