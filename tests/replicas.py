"""Where replicas run, as the arguments of public functions."""

from jax.sharding import Mesh


def over(where):
    """The arguments for the devices of a mesh, or for replicas that share one.

    Args:
      where: A mesh, or a number of replicas.
    """
    return {"mesh": where} if isinstance(where, Mesh) else {"replicas": where}
