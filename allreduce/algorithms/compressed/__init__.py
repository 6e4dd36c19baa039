"""Compressions: algorithms around an algorithm."""
