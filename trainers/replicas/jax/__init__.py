"""Any JAX function as a replica."""

from trainers.replicas.jax.replica import JaxReplica

__all__ = ["JaxReplica"]
