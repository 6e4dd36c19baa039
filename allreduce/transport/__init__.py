"""Bytes between ranks: messages, shared memory, waits, and the failures that MPI reports."""
