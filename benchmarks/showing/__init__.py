"""Results as records, tables, pictures and pages."""
