"""The parts of the training step benchmark."""
