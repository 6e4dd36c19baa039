"""Servers that hold the parameters, and the workers that compute for them: messages, rules, and who waits for what."""
