"""A server of one saved model: versions behind one port, batches that are dealt to the ranks. The command `serve`."""
