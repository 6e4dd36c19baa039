"""Fuzzing of everything that reads a file or a message: see __main__.py for the command, test_fuzz.py for the tests."""
