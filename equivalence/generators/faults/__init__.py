"""List the fault classes of rows: how to draw a row that has the fault, and how to detect that a row has it."""
