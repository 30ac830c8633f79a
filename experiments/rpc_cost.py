"""What does a call between two processes cost: with jdist, with torch's RPC and over a
bare socket, side by side in one run?

Each contender has two processes, each pinned to a core, with the same settings; torch
is also measured as shipped, without the process settings of `rpc.spawn`. The callee
returns its argument. The bare Unix socket moves the same bytes in both directions into
preallocated memory, without any protocol: the limit of the machine.
"""

import functools
import importlib.util
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import rpc

MIB = 2**18  # float32 numbers
SMALL = "3x3 echo"
ASYNC = "one of many asynchronous 3x3 echoes"
LARGE = {"1 MiB echo": 1 * MIB, "16 MiB echo": 16 * MIB, "64 MiB echo": 64 * MIB}
GOALS = {SMALL: 0.3, ASYNC: 0.5, **dict(zip(LARGE, (0.5, 1.0, 0.6), strict=True))}
"""Goals for the ratio to the time of torch as shipped."""
BARE_GOAL = 2.5
IN_PROCESS_GOAL = 30e-6
NUMPY, JAX, BARE = "jdist, NumPy", "jdist, JAX", "bare socket"
TORCH, SAME = "torch as shipped", "torch, same settings"
SLEEPING = "jdist, NumPy, without polling"

Seconds = dict[str, list[float]]


class Plan(NamedTuple):
    """The number of calls in one visit of a contender.

    Attributes:
      small: Synchronous echoes of nine numbers.
      asynchronous: The same, all started before the first one is waited for.
      large: Echoes of each large size.
      visits: Visits of each contender.
      variants: Whether to visit torch with jdist's process settings, too, and jdist
        without polling.
    """

    small: int
    asynchronous: int
    large: int
    visits: int
    variants: bool = True


FULL = Plan(small=2000, asynchronous=3000, large=12, visits=3)
QUICK = Plan(small=50, asynchronous=100, large=2, visits=1, variants=False)


def run(settings: Settings, progress: Progress) -> Result:
    """Visits the contenders in turn; collects seconds of all visits."""
    plan = QUICK if settings.quick else FULL
    with_torch = importlib.util.find_spec("torch") is not None
    seconds: dict[str, Seconds] = {}
    visits = [*(["ours", "torch", "bare"] if with_torch else ["ours", "bare"])]
    for name in progress.track(visits * plan.visits, description="contenders"):
        for contender, found in VISITS[name](plan).items():
            for job, values in found.items():
                seconds.setdefault(contender, {}).setdefault(job, []).extend(values)
    (inside,) = rpc.spawn(in_process, (plan,), nprocs=1, pin=1)
    hurried = "time is judged in the full form only" if settings.quick else ""
    timed = (claim.unless(hurried) for claim in speed_claims(seconds, inside))
    claims = [*echo_claims(rpc.spawn(_echoes, nprocs=2)[0]), *timed]
    return Result(
        claims=claims,
        pictures=[
            Picture("times", "Medians; whiskers hold the middle half.", plot(seconds))
        ],
        tables={"Seconds": rows(seconds, inside)},
        data={"seconds": seconds, "in_process": inside},
    )


# --- the contenders; each function runs in a process of its own ---


def echo(value: Any) -> Any:
    """The function of the callee, which returns its argument."""
    return value


def ours(plan: Plan) -> dict[str, Seconds]:
    """jdist with NumPy arrays, then JAX arrays; small ones also without polling."""
    found: dict[str, Seconds] = rpc.spawn(_ours, (plan,), nprocs=2, pin=1)[0]
    if plan.variants:
        found |= rpc.spawn(_sleeping, (plan,), nprocs=2, pin=1)[0]
    return found


def _ours(rank: int, plan: Plan) -> dict[str, Seconds]:
    rpc.init_rpc(f"worker{rank}", options=rpc.RpcOptions(), allow=("experiments",))
    found = {}
    if rank == 0:
        for name, kind in ((NUMPY, np.asarray), (JAX, jnp.asarray)):
            found[name] = _times(
                plan,
                functools.partial(_made, kind),
                lambda x: rpc.rpc_sync("worker1", echo, args=(x,)),
                lambda x: rpc.rpc_async("worker1", echo, args=(x,)),
            )
    rpc.shutdown()
    return found


def _sleeping(rank: int, plan: Plan) -> dict[str, Seconds]:
    options = rpc.RpcOptions(polling=0)
    rpc.init_rpc(f"worker{rank}", options=options, allow=("experiments",))
    found: Seconds = {}
    if rank == 0:
        small = _numbers(9)
        call = functools.partial(rpc.rpc_sync, "worker1", echo, (small,))
        found[SMALL] = list(_each(plan.small, call))
    rpc.shutdown()
    return {SLEEPING: found}


def torchs(plan: Plan) -> dict[str, Seconds]:
    """torch.distributed.rpc over TensorPipe, as shipped and with our settings."""
    found = {}
    forms = {TORCH: None, SAME: rpc.ProcessSettings()}
    for name, settings in list(forms.items())[: None if plan.variants else 1]:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (plan, f"{folder}/store")
            found[name] = rpc.spawn(
                _torchs, arguments, nprocs=2, pin=1, settings=settings
            )[0]
    return found


def _torchs(rank: int, plan: Plan, store: str) -> Seconds:
    warnings.simplefilter("ignore")
    import torch
    from torch.distributed import rpc as theirs

    torch.set_num_threads(1)
    options = theirs.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    theirs.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options
    )
    found: Seconds = {}
    if rank == 0:
        found = _times(
            plan,
            lambda n: torch.from_numpy(_numbers(n)),
            lambda x: theirs.rpc_sync("worker1", echo, args=(x,)),
            lambda x: theirs.rpc_async("worker1", echo, args=(x,)),
        )
    theirs.shutdown()
    return found


def bare(plan: Plan) -> dict[str, Seconds]:
    """A plain Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        return rpc.spawn(_bare, (plan, f"{folder}/s"), nprocs=2, pin=1)[0]


def _bare(rank: int, plan: Plan, path: str) -> dict[str, Seconds]:
    sizes = [(SMALL, 9, plan.small), *((j, n, plan.large) for j, n in LARGE.items())]
    with _connect(rank, path) as connection:
        found: Seconds = {}
        for job, count, calls in sizes:
            sent, received = _numbers(count), np.zeros(count, np.float32)
            turns = (_send, _receive) if rank == 0 else (_receive, _send)
            for _ in range(2 + calls):
                start = time.perf_counter()
                for turn in turns:
                    turn(connection, sent if turn is _send else received)
                found.setdefault(job, []).append(time.perf_counter() - start)
            found[job] = found[job][2:]
    return {BARE: found}


def _connect(rank: int, path: str) -> socket.socket:
    """Connects; rank 0 listens under a name that appears only when it is ready."""
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}.new")
            listener.listen()
            Path(f"{path}.new").rename(path)
            return listener.accept()[0]
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)


def _send(connection: socket.socket, array: Any) -> None:
    connection.sendall(memoryview(array).cast("B"))


def _receive(connection: socket.socket, array: Any) -> None:
    view = memoryview(array).cast("B")
    while view:
        view = view[connection.recv_into(view) :]


def in_process(rank: int, plan: Plan) -> list[float]:
    """Calls between two workers of one process, with a JAX array."""
    x = jnp.asarray(_numbers(9))
    with rpc.local_cluster(["here", "there"], allow=("experiments",)):
        return list(_each(plan.small, lambda: rpc.rpc_sync("there", echo, args=(x,))))


def _times(
    plan: Plan,
    make: Callable[[int], Any],
    call: Callable[[Any], Any],
    begin: Callable[[Any], Any],
) -> Seconds:
    small = make(9)
    found = {SMALL: list(_each(plan.small, lambda: call(small)))}
    found[ASYNC] = []
    for _ in range(4):
        start = time.perf_counter()
        for future in [begin(small) for _ in range(plan.asynchronous)]:
            future.wait()
        found[ASYNC].append((time.perf_counter() - start) / plan.asynchronous)
    for job, count in LARGE.items():
        large = make(count)
        found[job] = list(_each(plan.large, functools.partial(call, large)))
    return found


def _each(calls: int, call: Callable[[], Any]) -> Iterator[float]:
    for turn in range(calls + max(2, calls // 10)):
        start = time.perf_counter()
        call()
        if turn >= max(2, calls // 10):
            yield time.perf_counter() - start


def _made(kind: Callable[[np.ndarray], Any], count: int) -> Any:
    return kind(_numbers(count))


def _numbers(count: int) -> np.ndarray:
    shape = (3, 3) if count == 9 else (count,)
    return np.random.default_rng(count).random(shape, np.float32)


VISITS = {"ours": ours, "torch": torchs, "bare": bare}


# --- what came out ---


def echo_claims(same: Mapping[str, bool]) -> Iterator[Claim]:
    """Claims that the received arrays are those that were sent."""
    for kind, holds in same.items():
        text = f"{kind} arrays come back as {kind} arrays, bit for bit"
        yield Claim(text, holds, "all of them" if holds else "not all", leads=True)


def _echoes(rank: int) -> dict[str, bool]:
    rpc.init_rpc(f"worker{rank}", allow=("experiments",))
    found = {}
    if rank == 0:
        for kind, make in (("NumPy", np.asarray), ("JAX", jnp.asarray)):
            sent = [make(_numbers(n)) for n in (9, *LARGE.values())]
            back = [rpc.rpc_sync("worker1", echo, args=(x,)) for x in sent]
            expected = np.ndarray if kind == "NumPy" else jax.Array
            found[kind] = all(
                isinstance(y, expected)
                and np.asarray(x).tobytes() == np.asarray(y).tobytes()
                for x, y in zip(sent, back, strict=True)
            )
    rpc.shutdown()
    return found


def speed_claims(seconds: dict[str, Seconds], inside: list[float]) -> Iterator[Claim]:
    """Claims on each goal, for both kinds of array."""
    median = {
        c: {j: statistics.median(v) for j, v in s.items()} for c, s in seconds.items()
    }
    for ours_ in (NUMPY, JAX):
        for job, goal in GOALS.items():
            text = f"{job} ({ours_}) takes at most {goal} of torch's time"
            if TORCH in median:
                ratio = median[ours_][job] / median[TORCH][job]
                yield Claim(text, ratio <= goal, f"{ratio:.2f}")
            else:
                why_not = "torch is not installed (`make parity` does)"
                yield Claim(text, None, "", why_not)
            if job in LARGE:
                ratio = median[ours_][job] / median[BARE][job]
                text = f"{job} ({ours_}) takes at most {BARE_GOAL} of a bare socket's"
                yield Claim(text, ratio <= BARE_GOAL, f"{ratio:.2f}")
    found = statistics.median(inside)
    text = f"a call within one process takes under {IN_PROCESS_GOAL * 1e6:.0f} us"
    yield Claim(text, found < IN_PROCESS_GOAL, f"{found * 1e6:.1f} us")


def rows(seconds: dict[str, Seconds], inside: list[float]) -> list[list[str]]:
    """A table with a row for each job and contender."""
    peers = (TORCH, SAME, BARE)
    table = [["job", "contender", "median", "middle half", *(f"of {p}" for p in peers)]]
    for job in (SMALL, ASYNC, *LARGE):
        for contender, found in seconds.items():
            if job in found:
                low, middle, high = statistics.quantiles(found[job], n=4)
                ratios = [
                    f"{middle / statistics.median(seconds[peer][job]):.2f}"
                    if job in seconds.get(peer, {})
                    else ""
                    for peer in peers
                ]
                half = f"{low * 1e6:.0f} .. {high * 1e6:.0f} us"
                table.append([job, contender, f"{middle * 1e6:.0f} us", half, *ratios])
    low, middle, high = statistics.quantiles(inside, n=4)
    half = f"{low * 1e6:.1f} .. {high * 1e6:.1f} us"
    table.append(
        ["3x3 echo", "within a process", f"{middle * 1e6:.1f} us", half, "", "", ""]
    )
    return table


def plot(seconds: dict[str, Seconds]) -> Figure:
    """Bars on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(9, 4.5))
    jobs = (SMALL, ASYNC, *LARGE)
    width = 0.8 / len(seconds)
    for i, (contender, found) in enumerate(seconds.items()):
        at = [n for n, job in enumerate(jobs) if job in found]
        quartiles = [statistics.quantiles(found[jobs[n]], n=4) for n in at]
        middle = [q[1] * 1e3 for q in quartiles]
        spread = [
            [(q[1] - q[0]) * 1e3 for q in quartiles],
            [(q[2] - q[1]) * 1e3 for q in quartiles],
        ]
        where = [n + (i - len(seconds) / 2 + 0.5) * width for n in at]
        axes.bar(where, middle, width, yerr=spread, label=contender)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds per call")
    axes.set_xticks(
        range(len(jobs)), [job.replace(" of many ", " of many\n") for job in jobs]
    )
    axes.legend()
    axes.set_title(f"A call between two processes, {os.cpu_count()} cores")
    return figure
