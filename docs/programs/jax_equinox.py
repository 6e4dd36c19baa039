"""An Equinox model and an optax optimizer on many ranks.

mpirun -n 4 python jax_equinox.py
"""

import equinox as eqx
import jax
import numpy as np
import optax

import allreduce.jax
from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
reduce = allreduce.create("auto")
optimizer = optax.adamw(3e-3)


def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def step(model, state, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
    loss, grads = allreduce.jax.pmean((loss, grads), reduce)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


model = eqx.nn.MLP(64, 10, 64, 1, key=jax.random.key(0))
state = optimizer.init(eqx.filter(model, eqx.is_array))
for epoch in range(8):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    for batch in np.split(order, range(64, len(order), 64))[:-1]:
        batch = batch[reduce.rank :: reduce.size]
        model, state, loss = step(model, state, x_train[batch], data.y_train[batch])

accuracy = (jax.vmap(model)(x_test).argmax(1) == data.y_test).mean()
if reduce.rank == 0:
    print(f"loss {loss:.4f}, test accuracy {accuracy:.3f}")
jax.effects_barrier()
reduce.close()
