"""Draw findings on the terminal, as JSON and as an HTML page."""
