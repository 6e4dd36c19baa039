"""The strategies of training side by side: their runs, what travels in them, what the numbers say."""
