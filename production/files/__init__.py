"""Read packed JSONL files of any size by row number, in bounded memory."""
