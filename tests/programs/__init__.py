"""Programs that others wrote, over this library."""
