"""Stalls, time-outs, the status of ranks, and the end of a job."""
