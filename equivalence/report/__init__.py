"""Show a run's outcome on a terminal, as JSON and as one HTML page."""
