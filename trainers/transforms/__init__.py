"""Transforms of a step: each is one file, and changes the gradients or the parameters after they were averaged."""
