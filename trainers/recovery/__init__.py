"""Failed ranks, ranks that join, and SIGTERM."""
