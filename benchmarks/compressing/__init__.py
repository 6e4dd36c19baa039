"""The measurements of `benchmarks.compression`: calls, training, and the bits of exact training."""
