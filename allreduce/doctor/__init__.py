"""`python -m allreduce doctor`: checks whether these hosts are fit for training, and says what to change."""
