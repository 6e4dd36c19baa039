"""Strategies with servers, synchronous and asynchronous, and the messages between servers and workers."""
