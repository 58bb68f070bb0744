"""Turn messages into tokens and targets: prompt formats, encoding, turn checks, and what a tokenizer makes of a file."""
