"""Pure array code: dtypes, operations, chunks, trees, GPU staging. No communication."""
