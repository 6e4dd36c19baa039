"""When each rank did what, for Perfetto."""
