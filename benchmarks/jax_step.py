"""Measures the time of a JAX training step on several ranks, for each way of averaging gradients.

    mpirun -n 2 python -m benchmarks.jax_step --json out.json

"none": no communication; each rank computes a step as one compiled function. "replica": JaxReplica, whose gradients are
reduced in the memory of the backend. "pmean": allreduce.jax.pmean inside the compiled step. "gloo": JAX's own
collectives between the ranks. The variants take turns, one step each, so that a drifting machine affects all alike.
Times are of the slowest rank.

A network of 784 features, two equal hidden layers and 10 classes, SGD, float32. Every rank computes with one thread
unless XLA_FLAGS says otherwise.
"""

import argparse
import itertools
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import allreduce
from allreduce import Topology
from allreduce.transport.control import all_values, root_value
from benchmarks.lib import cli, timing
from benchmarks.lib.outputs import Screen
from benchmarks.lib.sizes import layers

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # before JAX is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    raise SystemExit(f'benchmarks.jax_step needs JAX ({error}): pip install ".[jax]" in the checkout') from error

import allreduce.jax as ours
from trainers.replicas.jax import JaxReplica

FEATURES, CLASSES, RATE = 784, 10, 0.01
VARIANTS = ("none", "replica", "pmean", "gloo")

Step = Callable[[], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    add, millions = parser.add_argument, cli.several(cli.at_least(0.01, float))
    add("--parameters", type=millions, default=[2.4, 10.0], metavar="M,M", help="millions (default: 2.4,10)")
    add("--batch", type=cli.at_least(1), default=32, metavar="N", help="rows per rank (default: 32)")
    add("--steps", type=cli.at_least(1), default=40, metavar="N", help="timed steps of each variant (default: 40)")
    cli.add_some(parser, "--variants", VARIANTS)
    add("--allreduce", choices=allreduce.NAMES, default="auto", metavar="NAME", help="(default: auto)")
    cli.add_json_option(parser)


def model(millions: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the weights and biases of a network with about `millions` million parameters."""
    random, sizes = np.random.default_rng(0), layers(1e6 * millions, FEATURES, CLASSES)
    return [
        (random.standard_normal((a, b), np.float32) * np.float32((2 / a) ** 0.5), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def apply(params: Any, x: Any) -> Any:
    for weights, bias in params[:-1]:
        x = jax.nn.relu(x @ weights + bias)
    return x @ params[-1][0] + params[-1][1]


def loss(output: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()


def _changed(params: Any, state: Any, x: Any, y: Any, mean: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Return the results of one step of SGD, which calls `mean` on the gradients."""
    value, gradients = jax.value_and_grad(lambda tree: loss(apply(tree, x), y))(params)
    changes, state = optax.sgd(RATE).update(mean(gradients), state, params)
    return optax.apply_updates(params, changes), state, value


def _looping(step: Any, params: Any, x: Any, y: Any) -> Step:
    held = [params, optax.sgd(RATE).init(params)]

    def run() -> None:
        held[0], held[1], value = step(*held, x, y)
        jax.block_until_ready((held[0], value))

    return run


def compiled(params: Any, x: Any, y: Any, mean: Callable[[Any], Any]) -> Step:
    """Return a step that is one compiled function of this process alone."""
    step = jax.jit(partial(_changed, mean=mean), donate_argnums=(0, 1))
    return _looping(step, jax.tree.map(jnp.array, params), x, y)


def replica(params: Any, x: Any, y: Any, reduce: Any) -> Step:
    """Return a step that does what MirroredTrainer does with a JaxReplica."""
    trained = JaxReplica(apply, loss, params, optax.sgd(RATE))
    buffer = reduce.allocate(trained.gradient_length, trained.gradient_dtype)
    trained.bind(None, buffer)

    def run() -> None:
        trained.gradients(x, y, 1 / reduce.size)
        reduce(buffer, "sum")
        trained.update()

    return run


def connect(topology: Topology) -> None:
    """Connect these processes in JAX. Collective. Call it before JAX computes anything."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    local = len(set(all_values(topology.world, socket.gethostname(), "exchange the address for gloo"))) == 1
    host = "127.0.0.1" if local else socket.getfqdn()
    with socket.create_server((host if local else "", 0)) as listener:
        port = listener.getsockname()[1]
    host, port = root_value(topology.world, [host, port], "exchange the address for gloo")
    jax.distributed.initialize(f"{host}:{port}", topology.size, topology.rank, local_device_ids=[0])


def gloo(params: Any, x: Any, y: Any) -> Step:
    """Return a step that is one compiled function of all processes, with JAX's own pmean."""
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as Spec

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    whole, rows = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("ranks"))

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "ranks"), tree)

    def changed(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        params, state, value = _changed(params, state, x, y, mean)
        return params, state, jax.lax.pmean(value, "ranks")

    specs = {"in_specs": (Spec(), Spec(), Spec("ranks"), Spec("ranks")), "out_specs": (Spec(), Spec(), Spec())}
    mapped = jax.jit(jax.shard_map(changed, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))
    place = jax.make_array_from_process_local_data
    placed = jax.tree.map(lambda leaf: place(whole, leaf), params)
    return _looping(mapped, placed, place(rows, x), place(rows, y))


def measure(topology: Topology, options: argparse.Namespace, millions: float, screen: Screen) -> dict[str, list[float]]:
    """Return variant -> seconds of each step, on the slowest rank. Collective."""
    params, random = model(millions), np.random.default_rng(topology.rank)
    x = random.standard_normal((options.batch, FEATURES), np.float32)
    y = random.integers(0, CLASSES, options.batch).astype(np.int32)
    with allreduce.create(options.allreduce, topology) as reduce:
        makers: dict[str, Callable[[], Step]] = {
            "none": lambda: compiled(params, x, y, lambda tree: tree),
            "replica": lambda: replica(params, x, y, reduce),
            "pmean": lambda: compiled(params, x, y, lambda tree: ours.pmean(tree, reduce)),
            "gloo": lambda: gloo(params, x, y),
        }
        steps = {name: makers[name]() for name in options.variants}
        times = timing.take_turns(topology.world, steps, options.steps, 2, screen)
        jax.effects_barrier()
    return times


def _run(topology: Topology, options: argparse.Namespace, screen: Screen) -> int:
    if "gloo" in options.variants:
        connect(topology)
    results = []
    for millions in options.parameters:
        times = measure(topology, options, millions, screen)
        results.append(
            {"parameters": millions, "ms": {name: [1e3 * each for each in row] for name, row in times.items()}}
        )
        screen.say(f"{topology}: {millions:g} M parameters, batch {options.batch}", timing.table(times))
    if "gloo" in options.variants:
        jax.distributed.shutdown()
    screen.write_record({"ranks": topology.size, "batch": options.batch, "results": results})
    return 0


main = cli.command("benchmarks.jax_step", __doc__, add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
