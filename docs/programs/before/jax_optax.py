"""A JAX loop with optax, on one process.

python jax_optax.py
"""

import jax
import numpy as np
import optax

from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))


def apply(params, x):
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


@jax.jit
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    changes, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, changes), state, loss


random = np.random.default_rng(0)
params = {
    "w1": random.normal(size=(64, 64)).astype("float32") / 8,
    "b1": np.zeros(64, "float32"),
    "w2": random.normal(size=(64, 10)).astype("float32") / 8,
    "b2": np.zeros(10, "float32"),
}
optimizer = optax.adamw(3e-3)
state = optimizer.init(params)

for epoch in range(8):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    for batch in np.split(order, range(64, len(order), 64))[:-1]:
        params, state, loss = step(params, state, x_train[batch], data.y_train[batch])

accuracy = (apply(params, x_test).argmax(1) == data.y_test).mean()
print(f"loss {loss:.4f}, test accuracy {accuracy:.3f}")
