"""Write a dumped batch, read one of any trainer, and find its row in a packed file."""
