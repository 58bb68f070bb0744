"""What is true of a packed SFT row, in plain PyTorch: slow, and written to be read beside docs/SPEC.md."""
