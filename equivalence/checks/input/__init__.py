"""Compare file reading, data order and the loader's batches with the reference."""
