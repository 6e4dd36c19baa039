"""Arithmetic on the flat arrays of a replica. No MPI."""
