"""Compare one row as several sides build it, and locate conversations, turns and padding in it."""
