"""`init_rpc`: this process becomes a worker."""

import os
from collections.abc import Iterable

from jdist._errors import requirement
from jdist.rpc.base import current
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.options import RpcOptions, check_options
from jdist.rpc.base.worker_info import MOST_WORKERS, WorkerInfo
from jdist.rpc.codec.functions import FunctionTable
from jdist.rpc.group import lifecycle
from jdist.rpc.group.lifecycle import Place
from jdist.rpc.group.rendezvous import KEY_VARIABLE, LAST_PORT, LOOPBACK
from jdist.rpc.wire.handshake import check_key


def init_rpc(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | tuple[str, int] | None = None,
    allow: Iterable[str] = (),
    options: RpcOptions | None = None,
) -> WorkerInfo:
    """Makes this process a worker of a group.

    A group of a fixed size, its `world_size`, forms once: all of its workers wait here
    for each other. An elastic group has none. Whoever comes waits only until all who
    are there know of him, and whoever shuts down leaves the others to go on.

    The workers meet at the coordinator, which runs in the process of rank 0; they may
    start in any order. `spawn` and `python -m jdist.launch` set the variables that
    stand for the arguments left out.

    Args:
      name: Unique in the group, of the characters `A-Za-z0-9_:-`.
      rank: 0 to world_size - 1, or to 65535 in an elastic group; by default `RANK`.
      world_size: Number of workers, or 0 for an elastic group; by default
        `WORLD_SIZE`, and 0 where that is not set either.
      coordinator: `"host:port"` or `(host, port)` of rank 0; by default `MASTER_ADDR`
        and `MASTER_PORT`. A group of one needs none.
      allow: What other workers may call beside the main program, its package,
        `jax.numpy`, `jax.nn` and `jdist`: modules (`"mypkg"`) or objects
        (`"mypkg.ops:step"`).
      options: See `RpcOptions`.

    Returns:
      This worker's name and rank.

    Raises:
      RpcError: RPC is initialized already; a name or rank is not unique; some workers
        were given a world_size and others none.
      RpcTimeout: Not all workers came in time; the message says which are missing.
      AuthenticationError: The coordinator has another key. There, and on all who wait,
        a `RuntimeWarning` tells of this worker at once; the wait goes on.
      TypeError, ValueError: An argument, or a variable in its place, is wrong.

    Source: `torch.distributed.rpc.init_rpc`. In torch, too, a group without a
    world_size is dynamic; what `WORLD_SIZE` says does not count there.

    Example:
      >>> from jdist import rpc
      >>> rpc.init_rpc("me", rank=0, world_size=1)
      WorkerInfo(name='me', id=0)
      >>> rpc.rpc_sync("me", max, args=(2, 3))
      3
      >>> rpc.shutdown()
    """
    options = RpcOptions() if options is None else options
    check_options("init_rpc(options=...)", options)
    rank = _number("rank", "RANK", rank)
    world_size = _number("world_size", "WORLD_SIZE", world_size, default=0)
    if not 0 <= world_size <= MOST_WORKERS:
        rule = f"must be in 1..{MOST_WORKERS}, or 0 for an elastic group"
        raise ValueError(requirement("init_rpc(world_size=...)", rule, world_size))
    if not 0 <= rank < (world_size or MOST_WORKERS):
        rule = f"must be in 0..{(world_size or MOST_WORKERS) - 1}"
        raise ValueError(requirement("init_rpc(rank=...)", rule, rank))
    info = WorkerInfo(name, rank)
    place = Place(
        info, world_size, _address(coordinator, world_size), _key(options, world_size)
    )
    functions = FunctionTable(allow)
    with current.becoming():
        agent = lifecycle.join(place, functions, options)
        current.add([agent])
    return info


def _number(
    argument: str, variable: str, given: int | None, default: int | None = None
) -> int:
    call = f"init_rpc({argument}=...)"
    if given is None:
        text = os.environ.get(variable)
        if text is None and default is not None:
            return default
        if text is None:
            rule = f"{argument} parameter missing, and environment variable {variable} "
            rule += "expected"
            raise ValueError(requirement(call, rule, "neither"))
        try:
            return int(text)
        except ValueError:
            rule = f"must be a number, here from the environment variable {variable}"
            raise ValueError(requirement(call, rule, text)) from None
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(requirement(call, "must be an integer", given))
    return given


def _address(given: str | tuple[str, int] | None, world_size: int) -> tuple[str, int]:
    call = "init_rpc(coordinator=...)"
    if given is None:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None or port is None:
            if world_size == 1:
                return (LOOPBACK, 0)
            rule = "must be given, or MASTER_ADDR and MASTER_PORT be set"
            raise ValueError(requirement(call, rule, "neither"))
        given = f"{host}:{port}"
    if isinstance(given, str):
        host, _, port = given.rpartition(":")
        parts: tuple[object, object] = (host.strip("[]"), _port(port))
    else:
        parts = (given[0], given[1]) if len(given) == 2 else (None, None)
    match parts:
        case (str() as host, int() as number) if host and 0 <= number <= LAST_PORT:
            return (host, number)
    rule = 'must be "host:port" or (host, port)'
    raise ValueError(requirement(call, rule, given))


def _port(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _key(options: RpcOptions, world_size: int) -> bytes:
    origin, key = "RpcOptions(key=...)", options.key
    if key is None:
        origin, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if key is not None:
        return check_key(key.encode() if isinstance(key, str) else key, origin)
    if world_size == 1:
        return lifecycle.random_key()
    raise RpcError(
        f"The workers need a secret that they share. Set {KEY_VARIABLE} on all of them "
        "to the same text, such as one made by rpc.new_cluster_key(), or give it as "
        "RpcOptions(key=...). rpc.spawn and jdist.launch do so by themselves."
    )
