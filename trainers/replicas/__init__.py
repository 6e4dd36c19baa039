"""Replicas: one framework a file."""
