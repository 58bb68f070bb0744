"""Keep recorded outcomes of other projects' unmodified code as data, with their provenance."""
