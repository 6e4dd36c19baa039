"""Ranks that join a running job."""
