"""Follow a row to one rank, step by step on every side (`--tp --cp --dp --pp --depth --rank`, and `--fed`)."""
