"""A fit: its loop, its checkpoints, its evaluation."""
