"""Draw rows, layouts, files, models and steps, aimed at the faults that have happened."""
