"""Callbacks, metrics and progress output of a fit."""
