"""Transforms of a step: one file each, with its options and its work; `transform` has their two bases."""
