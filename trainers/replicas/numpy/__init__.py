"""The built-in network, on NumPy or CuPy arrays."""
