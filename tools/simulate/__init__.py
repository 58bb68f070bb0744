"""Walk the indices of all ranks of a job in one process."""
