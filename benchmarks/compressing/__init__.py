"""The measurements of `benchmarks.compression`: calls, and training."""
