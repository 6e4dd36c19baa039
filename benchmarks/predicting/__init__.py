"""The cost model: what a measured machine says of larger ones."""
