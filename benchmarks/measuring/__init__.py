"""What is measured, of whom, and whether it is right."""
