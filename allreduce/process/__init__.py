"""The process of a rank: its launcher, the start of MPI, its children."""
