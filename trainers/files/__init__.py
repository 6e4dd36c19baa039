"""Model files and checkpoints: no pickle, written to a temporary file that is renamed."""
