"""The way of a row to one rank, step by step, with both sides of each: what `--tp --cp --dp --pp --depth --rank` show."""
