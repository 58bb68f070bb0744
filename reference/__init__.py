"""Say what is true of a packed SFT row in plain PyTorch, slowly, to be read beside docs/SPEC.md."""
