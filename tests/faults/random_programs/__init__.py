"""Random programs of collective calls, in each of which one rank differs or ends."""
