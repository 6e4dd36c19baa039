"""Many models on the ranks of one job: a search, an ensemble, and replicas that answer requests."""
