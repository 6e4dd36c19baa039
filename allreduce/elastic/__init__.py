"""Recovery after failed ranks, and standby ranks that replace them."""
