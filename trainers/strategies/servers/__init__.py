"""Asynchronous servers and their loop, which spare replicas use too, and the messages between servers and workers."""
