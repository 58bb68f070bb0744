"""Compare what each rank gets of a row or a bin, and what its losses become, without building a model."""
