"""Records what each rank does and when, for Perfetto."""
