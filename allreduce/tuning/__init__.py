"""The constants of the cost formulas: measured, written to a file, read."""
