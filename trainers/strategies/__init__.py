"""How the ranks of a training share its work."""
