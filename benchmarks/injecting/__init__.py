"""Faults, injected into real jobs: what is drawn, what one rank runs, how a job is driven, and what became of it."""
