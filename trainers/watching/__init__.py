"""What watches a training and tells people about it."""
