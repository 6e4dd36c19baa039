"""`python -m allreduce doctor`: is this place fit for training, and if it is not, what is to be done?"""
