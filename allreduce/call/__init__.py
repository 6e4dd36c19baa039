"""A collective call, from its arguments to its result."""
