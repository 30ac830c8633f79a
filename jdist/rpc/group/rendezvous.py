"""Ports, key and environment variables by which the processes of a run meet.

The variables are torchrun's, so that programs written for it find what they expect.
JAX's own coordinator cannot share rpc's port; it gets a second one, under the names
that `jax.distributed.initialize` reads by itself.
"""

import dataclasses
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Self

KEY_VARIABLE = "JDIST_CLUSTER_KEY"
LOOPBACK = "127.0.0.1"
LAST_PORT = 65535


class ReservedPort:
    """A port of this machine that no other program takes while this is open.

    A server that sets `SO_REUSEADDR`, as servers do, may listen on the port. Before
    one does, connecting is refused at once.
    Other systems than Linux do not let a second socket in: there the port is released
    at once and could be taken by another program before it is used.

    Args:
      port: The port; 0 for a free one.
      host: The IPv4 address of this machine on which it is reserved.

    Raises:
      OSError: Something listens on that port already.

    Example:
      >>> with ReservedPort() as reserved:
      ...     socket.create_server((LOOPBACK, reserved.port)).close()
    """

    def __init__(self, port: int = 0, host: str = LOOPBACK) -> None:
        self._socket = socket.socket()
        # Bound and never listening: the kernel gives the port to no program that asks
        # for any free one, and refuses it to those that do not set this option.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        # Other kernels do not let a second socket listen beside this one.
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """Releases the port."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The meeting point of a run, and the variables for each of its processes.

    Attributes:
      nprocs: Number of processes on each machine.
      nnodes: Number of machines.
      node_rank: The number of this machine.
      address: Address of the machine with rank 0, as the others reach it.
      port: Where rank 0's rpc coordinator listens.
      jax_port: Where rank 0's `jax.distributed` coordinator listens.
      key: The secret that proves to belong to the run.

    Example:
      >>> two = Rendezvous(nprocs=2, port=29500, jax_port=29501, key="k")
      >>> two.variables(1)["RANK"], two.variables(1)["MASTER_PORT"]
      ('1', '29500')
    """

    nprocs: int
    nnodes: int = 1
    node_rank: int = 0
    address: str = LOOPBACK
    port: int
    jax_port: int
    key: str = dataclasses.field(repr=False)

    def rank(self, local_rank: int) -> int:
        """The rank of a local process in the whole run."""
        return self.node_rank * self.nprocs + local_rank

    def variables(self, local_rank: int) -> Mapping[str, str]:
        """The environment variables of one process of this machine."""
        rank, size = self.rank(local_rank), self.nprocs * self.nnodes
        host = f"[{self.address}]" if ":" in self.address else self.address
        told = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.nprocs,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nnodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "JAX_COORDINATOR_ADDRESS": f"{host}:{self.jax_port}",
            KEY_VARIABLE: self.key,
        }
        if self.address == LOOPBACK:
            # JAX's coordinator authenticates no client, and listens on every interface
            # by default. JAX's own variable would also move the coordinator of a
            # program that gives `jax.distributed.initialize` an address of its own.
            told["JDIST_COORDINATOR_BIND_ADDRESS"] = f"{LOOPBACK}:{self.jax_port}"
        return {name: str(value) for name, value in told.items()}


def new_cluster_key() -> str:
    """Makes a new secret for a cluster: 256 random bits, for `JDIST_CLUSTER_KEY`.

    Example:
      >>> len(new_cluster_key())
      64
    """
    return secrets.token_hex(32)
