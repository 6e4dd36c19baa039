"""One algorithm a file."""
