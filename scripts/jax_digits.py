"""A plain single-process JAX loop, and the lines that make it data-parallel (marked +).

    python scripts/jax_digits.py                # one process, batches of 64
    mpirun -n 4 python scripts/jax_digits.py    # four, 16 rows of each batch on every rank

Both train on the same batches, so they reach the same accuracy.
"""

try:
    import jax
    import numpy as np
    import optax
except ImportError as error:
    raise SystemExit(f'JAX or optax is missing ({error}): pip install ".[jax]" in the checkout') from None

import allreduce.jax  # + 1
from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
reduce = allreduce.create("auto")  # + 2


def apply(params, x):
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


@jax.jit
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    loss, grads = allreduce.jax.pmean((loss, grads), reduce)  # + 3
    changes, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, changes), state, loss


random = np.random.default_rng(0)  # the same on every rank
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
    for batch in np.split(order, range(64, len(order), 64))[:-1]:  # not the short last batch: parts must be equal
        batch = batch[reduce.rank :: reduce.size]  # + 4
        params, state, loss = step(params, state, x_train[batch], data.y_train[batch])

accuracy = (apply(params, x_test).argmax(1) == data.y_test).mean()
if reduce.rank == 0:
    print(f"{reduce.topology}: loss {loss:.4f}, test accuracy {accuracy:.4f}")
jax.effects_barrier()  # wait for the calls above: close() is a collective too, which JAX does not order
reduce.close()
