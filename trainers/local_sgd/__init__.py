"""Local SGD: ranks train on their own for some steps, then average their changes. Used by trainers and PyTorch."""
