"""Jobs in which ranks die at named moments; the tests that start them check their output."""
