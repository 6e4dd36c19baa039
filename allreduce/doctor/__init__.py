"""`python -m allreduce doctor`: is this place fit for training, and if it is not, what is to be done?

A module a kind of finding: `look` finds out what one rank can find out alone, and `judge`, which is pure, makes
findings of what all ranks have found. A look that fails on one rank is a finding too, and keeps nobody waiting.
"""
