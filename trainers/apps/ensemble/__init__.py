"""Ensembles: several models of one task, trained on parts of the ranks, whose votes are combined."""
