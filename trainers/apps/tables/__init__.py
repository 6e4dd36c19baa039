"""Predicts the rows of files, of any size, to files. The command `predict`."""
