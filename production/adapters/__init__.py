"""The direct path in other people's trainers: what `docs/guides/own-trainer.md` imports, installed with the package."""
