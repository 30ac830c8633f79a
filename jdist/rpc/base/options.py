"""Settings of a worker: timeouts, threads, keys, limits."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jdist._errors import (
    check_at_least,
    check_choice,
    check_flags,
    check_type,
    type_error,
    value_error,
)
from jdist.rpc.base import device_maps

DEFAULT_TIMEOUT = 60.0
LONGEST_POLLING = 0.01
"""Seconds. Longer polling saves nothing: waking up costs far less than that, and a
deadline may be missed by the polling time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Settings of one worker; the defaults suit a trusted machine or a small cluster.

    Attributes:
      timeout: Seconds that a call may take when it does not say; 0 for no limit.
      join_timeout: Seconds to wait for the other workers in `init_rpc`, and for the
        name of a host to be known.
      heartbeat_timeout: Seconds of silence after which a worker counts as frozen. Signs
        of life, fifteen in this time and one a second at least, need the interpreter:
        it must be longer than the longest C function that keeps its lock (such as
        sorting a large list; XLA and NumPy release it).
      threads: Most asynchronous calls that run at once. Others wait in order in the
        callee's memory, of which their arguments take what they took on the wire: a
        caller that sends faster than they run limits itself, by waiting for futures.
        Their threads start on demand. Not limited are synchronous calls, which have a
        thread per connection, what the library itself sends, such as backward passes,
        and the calls that a called function makes: it may have a place and wait.
      key: The cluster's secret; by default that in `JDIST_CLUSTER_KEY`.
      host: Where this worker listens; by default the address of this machine on the
        way to the coordinator.
      device: The JAX device on which arrays arrive; by default JAX's own default.
      device_maps: By the name of a callee, on which of its devices arrays of certain
        devices of this worker arrive: `{"worker1": {0: 1}}`. A device is its place in
        `jax.local_devices()`. Results come back by the inverse. Arrays on other devices
        arrive on the callee's `device`.
      tls: Certificates for connections between machines.
      insecure: Allows plain connections between machines.
      allow_pickle: Lets values that have no other way travel as pickles. A peer that
        knows the key can then run any code here.
      max_array_bytes: Largest total size in bytes of the arrays of one message. A
        larger one is refused by its receiver before memory is allocated for it.
      polling: Seconds that a thread which awaits a message looks for it before it
        sleeps, while messages come that fast; 0 for never. It saves the time that
        waking takes and occupies a core meanwhile. Idle connections are not polled.
      leaks: What a graceful shutdown does when values of this worker are held by others
        although all references were given up: "warn" or "error".

    Raises:
      TypeError: A number is not one, a flag no bool, `host` no text;
        `device_maps` are no maps.
      ValueError: A number is negative, 0 or too large; a device map has a device twice.

    Source: `torch.distributed.rpc.TensorPipeRpcBackendOptions`.

    Example:
      >>> RpcOptions(timeout=5.0).timeout
      5.0
    """

    timeout: float = DEFAULT_TIMEOUT
    join_timeout: float = 60.0
    heartbeat_timeout: float = 15.0
    threads: int = 512
    # Not in the representation, which is logged and stands in errors.
    key: str | bytes | None = dataclasses.field(default=None, repr=False)
    host: str | None = None
    device: Any = None
    device_maps: Mapping[str, Mapping[int, int]] = dataclasses.field(
        default_factory=dict
    )
    tls: Any = None
    insecure: bool = False
    allow_pickle: bool = False
    max_array_bytes: int = 1 << 36
    polling: float = 500e-6
    leaks: str = "warn"

    def __post_init__(self) -> None:
        for name in ("timeout", "join_timeout", "heartbeat_timeout", "polling"):
            check_seconds(f"RpcOptions({name}=...)", getattr(self, name))
        if self.polling > LONGEST_POLLING:
            rule = f"must be at most {LONGEST_POLLING} s: who polls occupies a core"
            raise value_error("RpcOptions(polling=...)", rule, self.polling)
        if not self.heartbeat_timeout:
            rule = "must be above 0: a frozen worker would never be noticed"
            raise value_error("RpcOptions(heartbeat_timeout=...)", rule, 0)
        check_at_least("RpcOptions(threads=...)", self.threads, 1)
        check_at_least("RpcOptions(max_array_bytes=...)", self.max_array_bytes, 1)
        rule = "must be an address, a str"
        check_type("RpcOptions(host=...)", self.host, str | None, rule)
        # Any text is true: "False" would have opened what it was to close.
        own = {name: getattr(self, name) for name in ("insecure", "allow_pickle")}
        check_flags("RpcOptions", **own)
        device_maps.check(self.device_maps)
        check_choice("RpcOptions(leaks=...)", self.leaks, ("warn", "error"))

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two signs of life to the coordinator."""
        return min(1.0, self.heartbeat_timeout / 15)


def check_seconds(call: str, seconds: object) -> None:
    """Check that a value is a finite, non-negative number of seconds."""
    # The messages keep the words that torch's users search for.
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        rule = "must be a number of seconds (incompatible constructor arguments)"
        raise type_error(call, rule, seconds)
    if not seconds >= 0 or math.isinf(seconds):
        rule = "must be finite: RPC Timeout must be non-negative"
        raise value_error(call, rule, seconds, "0 means no limit.")


def check_options(call: str, options: object) -> None:
    """Check that a value is an `RpcOptions`."""
    if not isinstance(options, RpcOptions):
        remedy = "It takes the place of torch's Argument rpc_backend_options."
        raise type_error(call, "must be an instance of RpcOptions", options, remedy)
