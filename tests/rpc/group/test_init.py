"""Becoming a worker: arguments, variables, who meets whom, and who is missing."""

import os
import re
import secrets
import socket
import warnings

import pytest

from jdist import rpc
from jdist.rpc.base.worker_info import WorkerInfo
from jdist.rpc.group.lifecycle import JoinRequest
from jdist.rpc.group.rendezvous import ReservedPort
from jdist.rpc.processes import process_settings
from jdist.rpc.processes.supervisor import ProcessCommand
from tests.rpc.hosts import be_one_of, become_worker, results
from tests.rpc.sockets import names_unknown_at_first, nothing_left

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JDIST_CLUSTER_KEY")


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.port


@pytest.fixture
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def add(x, y):
    return x + y


# --- arguments ---


@pytest.mark.parametrize("name", ["abc*", " ", "a b", "ü"])
def test_names_with_other_characters(name):
    with pytest.raises(ValueError, match="Worker name must match"):
        rpc.init_rpc(name, rank=0, world_size=1)


def test_names_of_other_lengths():
    with pytest.raises(ValueError, match="must be non-empty"):
        rpc.init_rpc("", rank=0, world_size=1)
    with pytest.raises(ValueError, match="shorter than 128"):
        rpc.init_rpc("a" * 500, rank=0, world_size=1)


@pytest.mark.usefixtures("no_variables")
def test_arguments_that_are_nowhere():
    with pytest.raises(ValueError, match=r"rank parameter missing.*variable RANK"):
        rpc.init_rpc("a", world_size=1)
    for size in (2, 0, None):  # 0 and none: an elastic group
        with pytest.raises(ValueError, match="or MASTER_ADDR and MASTER_PORT be set"):
            rpc.init_rpc("a", rank=0, world_size=size)
        with pytest.raises(rpc.RpcError, match="JDIST_CLUSTER_KEY on all of them"):
            rpc.init_rpc("a", rank=0, world_size=size, coordinator="127.0.0.1:29500")


def test_variables_that_are_wrong(monkeypatch):
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(ValueError, match=r"variable RANK\. Got zero"):
        rpc.init_rpc("a", world_size=1)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"rank": 1.0}, TypeError, "must be an integer"),
        ({"rank": 2}, ValueError, r"must be in 0\.\.1"),
        ({"rank": -1}, ValueError, r"must be in 0\.\.1"),
        ({"world_size": -1}, ValueError, r"must be in 1\.\.65536, or 0"),
        ({"world_size": 65537}, ValueError, r"must be in 1\.\.65536, or 0"),
        ({"rank": 65536, "world_size": 0}, ValueError, r"must be in 0\.\.65535"),
        ({"coordinator": "somewhere"}, ValueError, '"host:port" or'),
        ({"coordinator": ":29500"}, ValueError, '"host:port" or'),
        ({"coordinator": ("h", 65536)}, ValueError, '"host:port" or'),
        ({"coordinator": ("h", 1, 2)}, ValueError, '"host:port" or'),
        ({"options": {}}, TypeError, "must be an instance of RpcOptions"),
        ({"allow": ["os"]}, ValueError, "os"),
    ],
)
def test_arguments_that_are_wrong(arguments, kind, text):
    given = {"rank": 0, "world_size": 2, "coordinator": "127.0.0.1:1"} | arguments
    options = {"options": rpc.RpcOptions(key=rpc.new_cluster_key())}
    with pytest.raises(kind, match=text):
        rpc.init_rpc("a", **(options | given))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"timeout": "1"}, TypeError, "incompatible constructor arguments"),
        ({"timeout": -1}, ValueError, "must be non-negative"),
        ({"join_timeout": float("inf")}, ValueError, "must be finite"),
        ({"heartbeat_timeout": 0}, ValueError, "must be above 0"),
        ({"heartbeat_timeout": "1"}, TypeError, "must be a number of seconds"),
        ({"max_array_bytes": 0}, ValueError, "must be at least 1"),
        ({"threads": 0}, ValueError, "must be at least 1"),
        ({"polling": -1e-6}, ValueError, "must be non-negative"),
        ({"polling": 0.02}, ValueError, "must be at most 0.01 s"),
    ],
)
def test_options_that_are_wrong(options, kind, text):
    with pytest.raises(kind, match=text):
        rpc.RpcOptions(**options)


def test_a_key_that_is_none(monkeypatch):
    """The message names where it was given, and does not show it."""
    options = rpc.RpcOptions(key="short")
    message = r"`RpcOptions\(key=\.\.\.\)` must have at least 16 random .* 5 bytes"
    with pytest.raises(ValueError, match=message):
        rpc.init_rpc("a", rank=0, world_size=1, options=options)
    assert "short" not in repr(options)
    with pytest.raises(TypeError, match=r"`RpcOptions\(key=.*must be bytes\. Got an i"):
        rpc.init_rpc("a", rank=0, world_size=1, options=rpc.RpcOptions(key=7))
    monkeypatch.setenv("JDIST_CLUSTER_KEY", "tiny")
    message = "`JDIST_CLUSTER_KEY` must have at least 16 random bytes. Got 4 bytes"
    with pytest.raises(ValueError, match=message):
        rpc.init_rpc("a", rank=0, world_size=1)


def test_no_representation_shows_the_key():
    """What the library keeps the key in may be logged."""
    key = secrets.token_hex(16)
    variables = {"JDIST_CLUSTER_KEY": key}
    settings = process_settings.resolved(None, 1)
    for holder in (
        JoinRequest(WorkerInfo("a", 0), 2, ("127.0.0.1", 1), key.encode()),
        ProcessCommand(
            name="a", command=["b"], environment=variables, settings=settings
        ),
        rpc.RpcOptions(key=key),
    ):
        assert key not in repr(holder)
        assert key not in str(holder)


# --- one worker ---


@pytest.mark.usefixtures("no_variables")
def test_a_group_of_one_needs_nothing():
    with nothing_left():
        for _ in range(3):
            info = rpc.init_rpc("me", rank=0, world_size=1, allow=["tests"])
            assert info == rpc.get_worker_info() == rpc.WorkerInfo("me", 0)
            assert rpc.rpc_sync("me", add, args=(1, 2)) == 3
            assert rpc.rpc_async(0, add, args=(1, 2)).wait() == 3
            rpc.barrier()
            rpc.shutdown()


@pytest.mark.usefixtures("no_variables")
def test_initialized_only_once():
    rpc.init_rpc("me", rank=0, world_size=1)
    try:
        with pytest.raises(rpc.RpcError, match="RPC is already initialized"):
            rpc.init_rpc("me", rank=0, world_size=1)
        with (
            pytest.raises(rpc.RpcError, match="RPC is already initialized"),
            rpc.local_cluster(["me"]),
        ):
            pass
        assert rpc.get_worker_info().name == "me"
    finally:
        rpc.shutdown()


def test_before_and_after(monkeypatch):
    def ask():
        for call in (
            rpc.get_worker_info,
            rpc.shutdown,
            rpc.barrier,
            rpc.debug_info,
            lambda: rpc.rpc_sync("me", add, args=(1, 2)),
            lambda: rpc.rpc_async("me", add, args=(1, 2)),
            lambda: rpc.all_gather(1),
            lambda: rpc.set_rpc_timeout(1),
        ):
            with pytest.raises(rpc.RpcError, match=r"^RPC has not been initialized"):
                call()

    ask()
    rpc.init_rpc("me", rank=0, world_size=1, coordinator=("127.0.0.1", 0))
    rpc.shutdown()
    ask()


def test_a_place_where_nobody_can_listen():
    with pytest.raises(OSError, match="must be an address of rank 0's machine"):
        rpc.init_rpc("a", rank=0, world_size=1, coordinator="192.0.2.1:29500")


def test_nobody_at_the_coordinators_place(port):
    options = rpc.RpcOptions(key=rpc.new_cluster_key(), join_timeout=0.2)
    with (
        nothing_left(),
        pytest.raises(rpc.RpcTimeout, match="could not reach the coord"),
    ):
        rpc.init_rpc(
            "b", rank=1, world_size=2, coordinator=("127.0.0.1", port), options=options
        )


def test_nobody_comes_to_the_coordinator(port):
    options = rpc.RpcOptions(key=rpc.new_cluster_key(), join_timeout=1.0)
    text = r"Not all of the 3 workers have come in time. Missing ranks: \[1, 2\]"
    with nothing_left(), pytest.raises(rpc.RpcTimeout, match=text):
        rpc.init_rpc(
            "a", rank=0, world_size=3, coordinator=("127.0.0.1", port), options=options
        )


# --- several ---


def infos():
    return rpc.get_worker_info(), rpc.get_worker_infos(), rpc.get_worker_info("worker1")


def test_everybody_knows_everybody(hosts):
    hosts.everywhere(become_worker)
    group = [rpc.WorkerInfo(f"worker{i}", i) for i in range(4)]
    try:
        for rank, told in enumerate(hosts.everywhere(infos)):
            assert told == (group[rank], group, group[1])
        with pytest.raises(rpc.RpcError, match="could not find destination 'worker9'"):
            hosts.run(1, rpc.get_worker_info, "worker9")
    finally:
        hosts.everywhere(rpc.shutdown)


def test_again_and_again_at_the_same_place(hosts):
    for turn in range(5):
        hosts.everywhere(become_worker)
        assert hosts.run(turn % 4, rpc.rpc_sync, "worker2", add, (turn, 1)) == turn + 1
        hosts.everywhere(rpc.shutdown)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_workers_start_in_any_order(hosts, port, order):
    joining = []
    for rank in order:
        if rank == 0 and joining:
            # Those who are early are already trying.
            assert not any(task.done(0.3) for task in joining)
        joining.append(hosts.start(rank, be_one_of, rank, 3, port))
    results(joining)
    assert hosts.run(2, rpc.rpc_sync, "worker0", add, (1, 2)) == 3
    results([hosts.start(rank, rpc.shutdown) for rank in range(3)])


def failures(tasks, kind):
    found = []
    for task in tasks:
        with pytest.raises(kind) as caught:
            task.result()
        found.append(str(caught.value))
    return found


def test_all_have_the_same_name(hosts, port):
    tasks = [hosts.start(rank, be_one_of, rank, 4, port, "same") for rank in range(4)]
    for text in failures(tasks, rpc.RpcError):
        assert "RPC worker name same is not unique. Workers " in text


def test_the_last_one_has_the_first_ones_name(hosts, port):
    names = ["worker0", "worker1", "worker2", "worker0"]
    tasks = [
        hosts.start(rank, be_one_of, rank, 4, port, names[rank]) for rank in range(4)
    ]
    for text in failures(tasks, rpc.RpcError):
        assert "RPC worker name worker0 is not unique. Workers 0 and 3" in text or (
            "Workers 3 and 0 share the same name" in text
        )


def test_two_have_the_same_rank(hosts, port):
    ranks = [0, 1, 1]
    tasks = [
        hosts.start(i, be_one_of, rank, 3, port, f"w{i}")
        for i, rank in enumerate(ranks)
    ]
    for text in failures(tasks, rpc.RpcError):
        assert "Rank 1 is not unique" in text


def test_groups_of_different_sizes(hosts, port):
    tasks = [
        hosts.start(0, be_one_of, 0, 2, port),
        hosts.start(1, be_one_of, 1, 3, port),
    ]
    for text in failures(tasks[1:], rpc.RpcError) + failures(tasks[:1], rpc.RpcError):
        assert "was told a world_size of 3, the coordinator 2" in text


def test_somebody_does_not_come(hosts, port):
    tasks = [hosts.start(r, be_one_of, r, 4, port, join_timeout=3.0) for r in (0, 2)]
    for text in failures(tasks, rpc.RpcTimeout):
        assert "Missing ranks: [1, 3]" in text


def test_somebody_comes_too_late(hosts, port):
    group = [hosts.start(rank, be_one_of, rank, 2, port) for rank in range(2)]
    results(group)
    late = hosts.start(2, be_one_of, 1, 2, port, "worker1")
    with pytest.raises(rpc.RpcError, match="RPC worker name worker1 is not unique"):
        late.result()
    assert hosts.run(0, rpc.rpc_sync, "worker1", add, (1, 2)) == 3
    results([hosts.start(rank, rpc.shutdown) for rank in range(2)])


def test_somebody_has_another_key(hosts, port):
    group = [hosts.start(rank, be_one_of, rank, 2, port) for rank in range(2)]
    results(group)
    stranger = hosts.start(2, be_one_of, 1, 2, port, "b", key=secrets.token_hex(32))
    with pytest.raises(rpc.AuthenticationError, match="key"):
        stranger.result()
    assert hosts.run(0, rpc.rpc_sync, "worker1", add, (1, 2)) == 3
    results([hosts.start(rank, rpc.shutdown) for rank in range(2)])


def met_a_stranger(rank, count, port, **options):
    """The warnings of one who waits, until it warns or all have come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        be_one_of(rank, count, port, **options)
    return [(one.category, str(one.message), one.filename) for one in caught]


def fails_on_a_stranger(rank, count, port):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        be_one_of(rank, count, port)


STRANGER = (
    "What connected as worker 'b' could not prove that it knows the cluster's key"
)


def test_a_key_that_differs_is_told_to_all_who_wait(hosts, port):
    """At once: with a limit of an hour on the wait, a warning that raises ends it."""
    waiting = [hosts.start(r, met_a_stranger, r, 3, port) for r in range(2)]
    stranger = hosts.start(2, be_one_of, 2, 3, port, "b", key=secrets.token_hex(32))
    message = (
        r"listens there could not prove .* RpcOptions\(key=\.\.\.\), must be the same"
    )
    with pytest.raises(rpc.AuthenticationError, match=message):
        stranger.result()
    # With the right key it is let in: a stranger does not end the others' wait.
    results([hosts.start(2, be_one_of, 2, 3, port)])
    for found in results(waiting):
        ((kind, text, file),) = found
        assert kind is RuntimeWarning
        assert text.startswith(STRANGER)
        assert text.endswith("It came from 127.0.0.1.")
        assert "jdist/rpc" not in file
    results([hosts.start(rank, rpc.shutdown) for rank in range(3)])


def test_a_key_that_differs_ends_the_wait_where_warnings_are_errors(hosts, port):
    waiting = hosts.start(0, fails_on_a_stranger, 0, 2, port)
    stranger = hosts.start(2, be_one_of, 1, 2, port, "b", key=secrets.token_hex(32))
    with pytest.raises(RuntimeWarning, match=STRANGER):
        waiting.result()
    with pytest.raises(rpc.AuthenticationError, match="could not prove"):
        stranger.result()


def test_a_missing_rank_with_another_key(hosts, port):
    """When time is up, the message still says that a worker was refused."""
    group = hosts.start(0, met_a_stranger, 0, 2, port, join_timeout=5.0)
    stranger = hosts.start(2, be_one_of, 1, 2, port, "b", key=secrets.token_hex(32))
    with pytest.raises(rpc.AuthenticationError, match="could not prove"):
        stranger.result()
    with pytest.raises(rpc.RpcTimeout, match=rf"Missing ranks: \[1\].*{STRANGER}"):
        group.result()


def leftovers(port):
    rank = int(os.environ["RANK"])
    with nothing_left():
        for _ in range(3):
            be_one_of(rank, 4, port)
            rpc.barrier()
            rpc.rpc_sync((rank + 1) % 4, add, args=(1, 2))
            rpc.rpc_async((rank + 2) % 4, add, args=(1, 2)).wait()
            rpc.shutdown()


def test_nothing_is_left_of_a_worker(hosts, port):
    results([hosts.start(rank, leftovers, port) for rank in range(4)])


def be_one_with_tls(rank, port):
    be_one_of(rank, 2, port, tls=rpc.TlsConfig())


def test_a_group_over_tls(hosts, port):
    results([hosts.start(rank, be_one_with_tls, rank, port) for rank in range(2)])
    assert hosts.run(0, rpc.rpc_sync, "worker1", add, (1, 2)) == 3
    results([hosts.start(rank, rpc.shutdown) for rank in range(2)])


def outward_address():
    """Of this machine, as others reach it; loopback where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: nobody; nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["localhost", outward_address()], ids=["by name", "outward"]
)
def test_a_coordinator_elsewhere(hosts, port, host):
    """Off loopback with certificates of the moment, which the key binds."""
    results([hosts.start(rank, be_one_at, host, rank, port) for rank in range(2)])
    assert hosts.run(1, rpc.rpc_sync, "worker0", add, (1, 2)) == 3
    results([hosts.start(rank, rpc.shutdown) for rank in range(2)])


# --- names that are not known yet ---


def be_one_by_name(rank, port, host=None, looks=5, **options):
    """At a coordinator, and perhaps itself, of which a cluster tells the name later."""
    with names_unknown_at_first(looks):
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=2,
            coordinator=("rank0.svc", port),
            allow=["tests"],
            options=rpc.RpcOptions(host=host, **options),
        )


@pytest.mark.parametrize("host", [None, "worker.svc"])
def test_the_name_of_a_host_is_published_late(hosts, port, host):
    """Rank 0's, which it looks up too, and a worker's own; none needs it afterwards."""
    results([hosts.start(rank, be_one_by_name, rank, port, host) for rank in range(2)])
    assert hosts.run(1, rpc.rpc_sync, "worker0", add, (4, 7)) == 11
    assert hosts.run(0, rpc.rpc_sync, "worker1", add, (5, 7)) == 12
    results([hosts.start(rank, rpc.shutdown) for rank in range(2)])


def test_the_name_of_a_host_is_never_published(hosts, port):
    """All that need it say so, with the name and what to do, when time is up."""
    start = hosts.start
    tasks = [
        start(r, be_one_by_name, r, port, join_timeout=0.3, looks=9e9) for r in (0, 1)
    ]
    for rank, text in enumerate(failures(tasks, rpc.RpcTimeout)):
        assert re.fullmatch(
            rf"`init_rpc\(coordinator=...\)` must be a host of which 'worker{rank}' "
            r"finds an address. Got 'rank0.svc', not found within 0.3 s \(.*Name or "
            r"service not known\). Is it spelled .* headless Service .*",
            text,
        )


def test_the_name_of_a_worker_is_never_published():
    options = rpc.RpcOptions(host="worker.svc", join_timeout=0.1)
    text = r"`RpcOptions\(host=...\)` must be .* Got 'worker.svc', not found within 0.1"
    with names_unknown_at_first(9e9), pytest.raises(rpc.RpcTimeout, match=text):
        rpc.init_rpc("alone", rank=0, world_size=1, options=options)


def be_one_at(host, rank, port):
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=2,
        coordinator=f"{host}:{port}",
        allow=["tests"],
    )
