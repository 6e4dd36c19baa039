"""A network of two layers in NumPy, and its training on one process.

python numpy_loop.py
"""

import numpy as np

from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
random = np.random.default_rng(0)
w1 = random.normal(size=(64, 32)) / 8
w2 = random.normal(size=(32, 10)) / 6
grad1, grad2 = np.empty_like(w1), np.empty_like(w2)

for _ in range(10):
    for batch in np.array_split(random.permutation(len(x_train)), 30):
        x, y = x_train[batch], data.y_train[batch]
        hidden = np.maximum(x @ w1, 0)
        odds = np.exp(hidden @ w2)
        error = odds / odds.sum(1, keepdims=True) - np.eye(10)[y]
        error /= len(batch)  # the gradient is a mean over the rows of the batch
        np.matmul(hidden.T, error, out=grad2)
        np.matmul(x.T, (error @ w2.T) * (hidden > 0), out=grad1)
        w1 -= 0.5 * grad1
        w2 -= 0.5 * grad2

accuracy = (np.argmax(np.maximum(x_test @ w1, 0) @ w2, 1) == data.y_test).mean()
print(f"test accuracy {accuracy:.3f}, weights' sum {w1.sum():.6f}")
