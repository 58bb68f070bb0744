"""Command lines: `conformance`, `vectors` and `judge`. Each module has a `main` that returns the exit status."""
