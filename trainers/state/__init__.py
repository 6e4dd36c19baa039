"""The state of a training: its pieces, checkpoints, backups, and how ranks take it on."""
