"""Feed other people's trainers by the direct path; `docs/guides/own-trainer.md` shows how."""
