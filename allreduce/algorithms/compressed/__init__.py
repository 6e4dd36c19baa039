"""Backends that wrap another backend."""
