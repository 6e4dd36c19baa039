"""The command line: python -m trainers."""
