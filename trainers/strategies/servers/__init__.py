"""An asynchronous parameter server: servers, workers, and the messages between them."""
