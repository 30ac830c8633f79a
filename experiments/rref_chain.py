"""Does a value stay on its owner while its reference passes through a chain of workers:
when does it travel, and when is it freed?

One worker makes an array. Its reference is passed from worker to worker, and the owner
is asked for its reference count after every step. Either all workers keep the reference
and drop it in random order, or each drops it as soon as it has passed it on, as in a
relay. All frames that the workers send are counted, with the bytes of their arrays.
"""

import collections
import functools
import gc
import hashlib
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._result import Claim, Picture, Result, Settings
from jdist import rpc
from jdist.rpc.wire.connection import Connection
from jdist.rpc.wire.frame import pack

PATIENCE = 60.0
OWNER = "worker1"
HOP_BYTES = 16 << 10
"""A generous limit on bytes that a step may send apart from arrays."""


class Plan(NamedTuple):
    """The sizes of an experiment."""

    workers: int
    steps: int
    numbers: int
    rounds: int


FULL = Plan(workers=8, steps=24, numbers=4 << 20, rounds=10)
QUICK = Plan(workers=4, steps=7, numbers=1 << 18, rounds=2)


def run(settings: Settings, progress: Progress) -> Result:
    """Runs one group of processes, whose first worker directs and observes."""
    plan = QUICK if settings.quick else FULL
    task = progress.add_task(f"{plan.workers} workers", total=None)
    found = rpc.spawn(_worker, (plan, settings.seed), nprocs=plan.workers)[0]
    progress.remove_task(task)
    return Result(
        claims=claims(plan, found),
        pictures=[
            Picture(
                "counts",
                "What the owner counts after each step, and what travels.",
                plot(plan, found),
            )
        ],
        tables={"Frames sent by all workers": rows(found)},
        data={"plan": plan._asdict(), **found},
    )


# --- on every worker ---

_kept: list[rpc.RRef[Any]] = []
_sent: collections.Counter[tuple[str, str]] = collections.Counter()
_freed = threading.Event()


def make(seed: int, count: int) -> jax.Array:
    """Makes the value and an event for its release; called on the owner."""
    _freed.clear()
    value = jnp.asarray(np.random.default_rng(seed).random(count, np.float32))
    weakref.finalize(value, _freed.set)
    return value


def keep(rref: rpc.RRef[Any]) -> None:
    """Stores a reference."""
    _kept.append(rref)


def pass_on(to: str) -> None:
    """Gives the next worker the reference that this one holds."""
    rpc.rpc_sync(to, keep, args=(_kept[-1],))


def give_up() -> None:
    """Drops all references."""
    _kept.clear()
    gc.collect()


def fetch() -> str:
    """Fetches the value; returns its digest."""
    return digest(_kept[-1].to_here())


def counted() -> tuple[int, int, bool]:
    """The owner's values with remote users, their forks, and whether it is freed."""
    gc.collect()
    told = rpc.debug_info()
    return int(told["num_owner_rrefs"]), int(told["num_forks"]), _freed.is_set()


def pending() -> int:
    """The number of references that wait for their owner."""
    return int(rpc.debug_info()["num_pending_users"])


def freed() -> bool:
    """Waits until the value is freed; called on the owner."""
    return _freed.wait(PATIENCE)


def tally() -> dict[tuple[str, str], int]:
    """The frames and bytes that this worker has sent since the last call."""
    told = dict(_sent)
    _sent.clear()
    return told


def digest(value: jax.Array) -> str:
    """A SHA-256 digest of all bits of an array."""
    return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()


def _count_frames() -> None:
    send = Connection.send

    def counting(self: Any, frame: Any, deadline: float | None = None) -> None:
        pieces = pack(frame)
        _sent[frame.kind, "frames"] += 1
        _sent[frame.kind, "bytes"] += sum(map(len, pieces))
        _sent[frame.kind, "array bytes"] += sum(leaf.nbytes for leaf in frame.leaves)
        send(self, frame, deadline)

    Connection.send = counting  # type: ignore[method-assign]


# --- the director, worker0 ---


def _worker(rank: int, plan: Plan, seed: int) -> dict[str, Any]:
    _count_frames()
    rpc.init_rpc(f"worker{rank}", allow=("experiments",))
    found = _direct(plan, seed) if rank == 0 else {}
    rpc.shutdown()
    return found


def _direct(plan: Plan, seed: int) -> dict[str, Any]:
    names = [f"worker{rank}" for rank in range(plan.workers)]
    expected = digest(make(seed, plan.numbers))
    users = [name for name in names if name != OWNER]
    found: dict[str, Any] = {"rounds": []}
    for turn in range(plan.rounds):
        draw = random.Random(f"{seed}/{turn}")
        # Every user at least once, some several times, possibly twice in a row.
        chain = users + draw.choices(users, k=plan.steps - len(users))
        draw.shuffle(chain)
        order = draw.sample(users, len(users))
        found["rounds"].append(_keeping(chain, order, seed, plan))
    chain = (users * plan.steps)[: plan.steps]
    _tallies(names)
    found["relay"] = _relay(chain, seed, plan)
    found["forwarding"] = _tallies(names)
    _begin(chain[0], seed, plan)
    _forward(chain[0], chain[1])
    _tallies(names)
    found["same"] = rpc.rpc_sync(chain[1], fetch) == expected
    found["fetching"] = _tallies(names)
    for name in chain[:2]:
        rpc.rpc_sync(name, give_up)
    found["freed after fetching"] = rpc.rpc_sync(OWNER, freed)
    found["pending"] = [rpc.rpc_sync(name, pending) for name in names]
    found["left"] = _settled(lambda told: told[:2] == (0, 0))
    return found


def _begin(first: str, seed: int, plan: Plan) -> None:
    """Makes the value; afterwards only the first of the chain holds a reference."""
    rref = rpc.remote(OWNER, make, args=(seed, plan.numbers))
    rpc.rpc_sync(first, keep, args=(rref,))
    del rref
    gc.collect()


def _forward(giver: str, taker: str) -> None:
    rpc.rpc_sync(giver, pass_on, args=(taker,))


def _keeping(
    chain: list[str], order: list[str], seed: int, plan: Plan
) -> dict[str, Any]:
    """All keep the reference, then drop it in the given order."""
    _begin(chain[0], seed, plan)
    up = [_settled(functools.partial(_counts, 1))]
    for holders, (giver, taker) in enumerate(itertools.pairwise(chain), start=2):
        _forward(giver, taker)
        up.append(_settled(functools.partial(_counts, holders)))
    held, down = collections.Counter(chain), []
    for name in order[:-1]:
        rpc.rpc_sync(name, give_up)
        held.pop(name)
        down.append(_settled(functools.partial(_counts, held.total())))
    rpc.rpc_sync(order[-1], give_up)
    bell = rpc.rpc_sync(OWNER, freed)
    down.append(_settled(lambda told: told[:2] == (0, 0)))
    return {"up": up, "down": down, "freed": bell}


def _relay(chain: list[str], seed: int, plan: Plan) -> dict[str, Any]:
    """Each drops the reference as soon as it has passed it on."""
    _begin(chain[0], seed, plan)
    seen = []
    for giver, taker in itertools.pairwise(chain):
        _forward(giver, taker)
        rpc.rpc_sync(giver, give_up)
        seen.append(rpc.rpc_sync(OWNER, counted))
    alive = _settled(functools.partial(_counts, 1))
    rpc.rpc_sync(chain[-1], give_up)
    return {"seen": seen, "last": alive, "freed": rpc.rpc_sync(OWNER, freed)}


def _counts(forks: int, told: tuple[int, int, bool]) -> bool:
    return told[1] == forks


def _settled(wanted: Callable[[Any], bool]) -> tuple[int, int, bool]:
    """The owner's counts, after messages in transit have arrived."""
    until = time.monotonic() + PATIENCE
    while True:
        told = rpc.rpc_sync(OWNER, counted)
        if wanted(told) or time.monotonic() > until:
            return told
        time.sleep(0.002)


def _tallies(names: list[str]) -> dict[str, dict[str, int]]:
    """Frames and bytes that all workers have sent since the last call, by kind."""
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    for name in names:
        total.update(rpc.rpc_sync(name, tally))
    found: dict[str, dict[str, int]] = {}
    for (kind, what), number in total.items():
        found.setdefault(kind, {})[what] = number
    return found


# --- what came out ---


def claims(plan: Plan, found: dict[str, Any]) -> list[Claim]:
    """The claims of the experiment, from counts alone; nothing is timed."""
    rounds, relay = found["rounds"], found["relay"]
    steps = plan.steps
    nbytes = 4 * plan.numbers
    ups = [[told[1] for told in r["up"]] for r in rounds]
    early = sum(told[2] for r in rounds for told in (*r["up"], *r["down"][:-1]))
    states = sum(len(r["up"]) + len(r["down"]) - 1 for r in rounds)
    in_time = sum(r["freed"] for r in rounds)
    others_too = relay["freed"] and found["freed after fetching"]
    passed = relay["seen"]
    arrays = total(found["forwarding"], "array bytes")
    control = total(found["forwarding"], "bytes") / steps
    fetched = total(found["fetching"], "array bytes")
    return [
        Claim(
            "the owner counts one more after every step of the chain",
            all(up == list(range(1, steps + 1)) for up in ups),
            f"1 .. {max(map(max, ups))} in each of {len(ups)} rounds",
        ),
        Claim(
            "the value is never freed while a worker holds a reference",
            early == 0 and not any(told[2] for told in (*passed, relay["last"])),
            f"{early} of {states + len(passed) + 1} times looked",
        ),
        Claim(
            "it is freed when the last one, in random order, has given up",
            in_time == len(rounds) and others_too,
            f"{in_time} of {len(rounds)} rounds, the relay, and when it was fetched",
            leads=True,
        ),
        Claim(
            "in the relay each gives up at once, and the next one still has it",
            all(told[1] >= 1 for told in passed) and relay["last"][1] == 1,
            f"{min(told[1] for told in passed)} .. {max(t[1] for t in passed)} counted",
        ),
        Claim(
            "forwarding moves no byte of the value",
            arrays == 0,
            f"{arrays} of {nbytes} bytes in {steps} steps",
            leads=True,
        ),
        Claim(
            f"a step sends at most {HOP_BYTES >> 10} KiB, all messages included",
            control <= HOP_BYTES,
            f"{control:.0f} bytes",
        ),
        Claim(
            "fetching moves it once, bit for bit",
            fetched == nbytes and found["same"],
            f"{fetched} bytes",
        ),
        Claim(
            "all counts return to zero",
            found["left"][:2] == (0, 0) and not any(found["pending"]),
            f"owner {found['left'][:2]}, pending {sum(found['pending'])}",
        ),
    ]


def total(tally: dict[str, dict[str, int]], what: str) -> int:
    """The sum over all kinds of frames."""
    return sum(kind.get(what, 0) for kind in tally.values())


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A table with a row for each phase and kind of frame."""
    table = [["phase", "kind of frame", "frames", "bytes", "of arrays"]]
    for phase in ("forwarding", "fetching"):
        for kind, numbers in sorted(found[phase].items()):
            cells = (numbers.get(w, 0) for w in ("frames", "bytes", "array bytes"))
            table.append([phase, kind, *map(str, cells)])
    return table


def plot(plan: Plan, found: dict[str, Any]) -> Figure:
    """Counts over steps, with bytes beside them."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained"
    )
    for number, one in enumerate(found["rounds"]):
        counts = [told[1] for told in (*one["up"], *one["down"])]
        last = len(counts) - 1
        label = "all keep it, then give up in random order" if number == 0 else None
        left.plot(range(len(counts)), counts, color="C0", alpha=0.4, label=label)
        label = "the value is freed" if number == 0 else None
        left.plot(last, counts[-1], "o", color="C3", label=label)
    relay = [told[1] for told in found["relay"]["seen"]]
    left.step(range(1, len(relay) + 1), relay, color="C1", label="relay")
    left.set_xlabel("step")
    left.set_ylabel("references that the owner counts")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    names = ["the value", "forwarded\nby all", "fetched\nonce"]
    sizes = [
        4 * plan.numbers,
        total(found["forwarding"], "bytes"),
        total(found["fetching"], "bytes"),
    ]
    right.bar(names, [size / 2**20 for size in sizes], color=["C7", "C1", "C0"])
    right.set_yscale("log")
    right.set_ylabel("MiB sent by all workers")
    figure.suptitle(f"A reference in chains of {plan.workers} workers")
    return figure
