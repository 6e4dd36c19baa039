"""A Flax NNX model and an optax optimizer.

python jax_flax.py
"""

import numpy as np
import optax
from flax import nnx

from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.second = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
for epoch in range(8):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    for batch in np.split(order, range(64, len(order), 64))[:-1]:
        loss = step(model, optimizer, x_train[batch], data.y_train[batch])

accuracy = (model(x_test).argmax(1) == data.y_test).mean()
print(f"loss {loss:.4f}, test accuracy {accuracy:.3f}")
