"""The command `python -m trainers search`: which options of a training it varies, its trials, and what it shows."""
