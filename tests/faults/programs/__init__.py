"""What the ranks of a drawn run do."""
