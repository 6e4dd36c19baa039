"""Applications on top of the trainers, as a user could write them. Nothing below imports them, and `import trainers`
loads none of them."""
