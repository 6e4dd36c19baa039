"""Backends around a backend."""
