"""Jobs in which ranks die at named moments; the tests that start them judge what they print."""
