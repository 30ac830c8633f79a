"""`python -m jdist.launch`: what workers are given, what the user sees, how it ends."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jdist.launch.options import cluster_key, parse
from jdist.launch.relay import last_traceback
from tests.plugin_notices import without_notices
from tests.rpc.process_watch import ProcessWatch, await_gone

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "jdist.launch"]


@pytest.fixture
def watch():
    with ProcessWatch() as found:
        yield found


@pytest.fixture
def start(tmp_path):
    """`start(arguments, program)`: a launcher of that program, still running."""
    running = []

    def make(arguments, program, **variables):
        (tmp_path / "program.py").write_text(program)
        surroundings = {k: v for k, v in os.environ.items() if k != "JDIST_CLUSTER_KEY"}
        launcher = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env={**surroundings, "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
        )
        running.append(launcher)
        return launcher

    yield make
    for launcher in running:
        with launcher:
            launcher.kill()


@pytest.fixture
def launch(start):
    """As `start`, to the end: exit status, output and errors as text."""

    def run(arguments, program, **variables):
        launcher = start(arguments, program, **variables)
        output, errors = launcher.communicate(b"not for workers", timeout=240)
        return launcher.returncode, output.decode(), without_notices(errors.decode())

    return run


SHOW = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path[0], sys.stdin.read(), dict(os.environ)]))
"""


def _shown(output):
    """What each worker said, by name."""
    lines = [re.fullmatch(r"\[(\w+)\] (.*)", line) for line in output.splitlines()]
    return {line[1]: json.loads(line[2]) for line in lines}


def test_torchruns_variables(launch, tmp_path):
    command = ["--nproc", 2, "program.py", "--lr", "3"]
    status, output, errors = launch(command, SHOW, JAX_NUM_CPU_DEVICES="1")
    assert (status, errors) == (0, "")
    shown = _shown(output)
    assert set(shown) == {"worker0", "worker1"}
    for rank, name in enumerate(sorted(shown)):
        main, arguments, path, stdin, told = shown[name]
        assert (main, arguments) == ("__main__", ["program.py", "--lr", "3"])
        assert (path, stdin) == (str(tmp_path), "")
        for variable in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert told[variable] == str(rank)
        for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert told[variable] == "2"
        assert (told["GROUP_RANK"], told["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert told["MASTER_ADDR"] == "127.0.0.1"
        assert told["PJRT_NPROC"] == "8"
        assert (told["JDIST_RESTART_COUNT"], told["JDIST_MAX_RESTARTS"]) == ("0", "0")
        assert told["JDIST_BATCH_CLASS"] == "1"
    first, second = (told[4] for told in shown.values())
    for variable in ("MASTER_PORT", "JDIST_CLUSTER_KEY", "JAX_COORDINATOR_ADDRESS"):
        assert first[variable] == second[variable]
    assert len(first["JDIST_CLUSTER_KEY"]) == 64


def test_one_machine_of_several(launch, tmp_path):
    key = tmp_path / "cluster.key"
    key.write_text("0123456789abcdef\n")
    key.chmod(0o600)
    where = ["--nnodes", 3, "--node-rank", 2, "--master-addr", "10.0.0.1"]
    rest = ["--key-file", key, "--no-process-settings", "--nproc", 2, "-m", "program"]
    status, output, errors = launch([*where, *rest], SHOW)
    assert (status, errors) == (0, "")
    shown = _shown(output)
    assert set(shown) == {"worker4", "worker5"}
    told = shown["worker5"][4]
    assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == ("5", "1", "6")
    assert (told["GROUP_RANK"], told["GROUP_WORLD_SIZE"]) == ("2", "3")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert told["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:29501"
    assert told["JDIST_CLUSTER_KEY"] == "0123456789abcdef"
    assert "PJRT_NPROC" not in told
    assert "JDIST_BATCH_CLASS" not in told


def test_lines_bear_names_and_logs_do_not(launch, tmp_path):
    program = (
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "sys.stdout.write(f'half {rank}\\rdone {rank}\\nno end')\n"
        "sys.stderr.buffer.write(b'\\xff\\xc3\\xa9\\n')\n"
    )
    folder = tmp_path / "new" / "logs"
    arguments = ["--nproc", 2, "--log-dir", folder, "program.py"]
    status, output, errors = launch(arguments, program)
    assert status == 0
    assert sorted(output.splitlines()) == [
        f"[worker{rank}] {text}"
        for rank in range(2)
        for text in sorted((f"done {rank}", f"half {rank}", "no end"))
    ]
    assert sorted(errors.splitlines()) == ["[worker0] \\xffé", "[worker1] \\xffé"]
    for rank in range(2):
        lines = (folder / f"worker{rank}.log").read_text().splitlines()
        assert sorted(lines) == sorted(
            ["\\xffé", f"done {rank}", f"half {rank}", "no end"]
        )


FAILING = """
import os, sys
from tests.rpc.process_watch import report_with_child, pause
report_with_child(int(sys.argv[1]), f"rank{os.environ['RANK']}")
if os.environ["RANK"] == "0":
    pause()
try:
    {}["first"]
except KeyError as error:
    raise ValueError("the second") from error
"""


def test_the_first_failure_ends_the_rest_and_is_seen_last(start, watch, tmp_path):
    logs = tmp_path / "logs"
    arguments = ["--nproc", 2, "--log-dir", logs, "program.py", watch.port]
    launcher = start(arguments, FAILING)
    pids = watch.expect(4)
    _, errors = launcher.communicate(timeout=240)
    await_gone(pids.values())
    assert launcher.returncode == 1
    seen, verdict, last = without_notices(errors.decode()).partition(
        f"worker1 (pid {pids['rank1']}) ended with exit code 1; the others were ended. "
        f"Its log: {logs / 'worker1.log'}\n"
    )
    assert verdict, without_notices(errors.decode())
    assert "[worker1] ValueError: the second" in seen
    assert last.startswith("Traceback (most recent call last):\n")
    assert "\nKeyError: 'first'\n" in last
    assert last.endswith("\nValueError: the second\n")


RESTARTED = """
import os, sys
from tests.rpc.process_watch import report, pause
rank, count = os.environ["RANK"], os.environ["JDIST_RESTART_COUNT"]
print(os.environ["MASTER_PORT"], os.environ["JDIST_MAX_RESTARTS"], flush=True)
report(int(sys.argv[1]), f"rank{rank}:{count}")
if count == sys.argv[2]:
    sys.exit()
if rank == "0":
    pause()
raise SystemExit(30 + int(count))
"""


@pytest.mark.parametrize(("succeeds", "starts"), [(1, 2), (9, 3)])
def test_after_a_failure_all_are_started_again(
    succeeds, starts, start, watch, tmp_path
):
    """Up to so often; the last one's exit code counts."""
    logs = tmp_path / "logs"
    options = ["--nproc", 2, "--max-restarts", 2, "--log-dir", logs]
    arguments = [*options, "program.py", watch.port, succeeds]
    launcher = start(arguments, RESTARTED)
    pids = {}
    for count in range(starts):
        # Those of before have ended when the next ones begin.
        await_gone(pids.values())
        pids = watch.expect(2)
        assert set(pids) == {f"rank0:{count}", f"rank1:{count}"}
    output, errors = launcher.communicate(timeout=240)
    await_gone(pids.values())
    assert launcher.returncode == (0 if succeeds == 1 else 32)
    ((port, most),) = {tuple(line.split()[1:]) for line in output.decode().splitlines()}
    assert (int(port) > 0, most) == (True, "2")
    told = [
        line.partition(") ")[2].partition(str(logs))
        for line in without_notices(errors.decode()).splitlines()
    ]
    again = "; the others were ended. All are started again, restart"
    expected = [
        (f"ended with exit code 30{again} 1 of 2. Its log: ", "/worker1.log"),
        (f"ended with exit code 31{again} 2 of 2. Its log: ", "/worker1.restart1.log"),
        (
            "ended with exit code 32; the others were ended. Its log: ",
            "/worker1.restart2.log",
        ),
    ]
    assert [(words, log) for words, _, log in told] == (
        expected[:1] if succeeds == 1 else expected
    )
    for rank in range(2):
        for again in ["", *(f".restart{n}" for n in range(1, starts))]:
            assert (logs / f"worker{rank}{again}.log").read_text() == f"{port} 2\n"


def test_an_interrupt_is_no_failure(start, watch):
    """Nothing is started again after Ctrl-C."""
    arguments = ["--nproc", 1, "--max-restarts", 5, "program.py", watch.port, 0]
    launcher = start(arguments, STUBBORN.replace("signal.SIGTERM", "signal.SIGHUP"))
    watch.expect(1)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=240)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert without_notices(errors.decode()) == "SIGTERM: all workers were ended.\n"


def test_other_exit_codes_and_signals_are_passed_on(launch):
    status, _, errors = launch(["--nproc", 1, "program.py"], "raise SystemExit(41)")
    assert status == 41
    assert re.search(r"worker0 \(pid \d+\) ended with exit code 41\.\n$", errors)
    program = "import os; os.kill(os.getpid(), 11)"
    status, _, errors = launch(["--nproc", 1, "program.py"], program)
    assert status == 128 + 11
    assert "was killed by SIGSEGV" in errors


def test_an_inherited_disregard_of_children_does_not_hide_a_failure(tmp_path):
    command = 'trap "" CHLD; exec "$@"'
    arguments = ["--nproc", "1", "--no-python", "sh", "-c", "exit 9"]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *COMMAND, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 9


def test_programs_that_are_not_python(launch):
    arguments = ["--nproc", 1, "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"']
    assert launch(arguments, "") == (0, "[worker0] 0 of 1\n", "")
    status, _, errors = launch(["--nproc", 1, "--no-python", "no-such"], "")
    assert status == 127
    assert "cannot run no-such: No such file or directory" in errors


WAITING = """
import os, sys
from tests.rpc.process_watch import report_with_child, pause
try:
    report_with_child(int(sys.argv[1]), f"rank{os.environ['RANK']}")
    pause()
except KeyboardInterrupt:
    print("tidying up")
    raise SystemExit(3)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_no_orphan_survives_the_launcher(name, start, watch):
    number = signal.Signals[name]
    launcher = start(["--nproc", 2, "program.py", watch.port], WAITING)
    pids = watch.expect(4)
    launcher.send_signal(number)
    output, errors = launcher.communicate(timeout=240)
    await_gone(pids.values())
    if name == "SIGKILL":
        assert launcher.returncode == -number
        return
    assert launcher.returncode == 128 + number
    assert without_notices(errors.decode()).endswith(
        f"{name}: all workers were ended.\n"
    )
    assert output.count(b"tidying up") == (2 if name == "SIGINT" else 0)


IN_TRAINING = """
import os, sys
from jdist import rpc
from tests.rpc.process_watch import pause, report
rank = int(os.environ["RANK"])
def work():
    report(int(sys.argv[1]), f"rank{rank}")
    pause()
rpc.init_rpc(f"worker{rank}")
try:
    rpc.rpc_sync(f"worker{1 - rank}", work, timeout=0)
finally:
    print("tidying up", file=sys.stderr)
    rpc.shutdown(graceful=False)
"""


def test_ctrl_c_ends_a_training(start, watch, tmp_path):
    """What the workers write while they tidy up is shown, and where they were."""
    logs = tmp_path / "logs"
    arguments = ["--nproc", 2, "--log-dir", logs, "program.py", watch.port]
    launcher = start(arguments, IN_TRAINING)
    pids = watch.expect(2)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=240)
    await_gone(pids.values())
    assert launcher.returncode == 130
    *told, last = without_notices(errors.decode()).splitlines()
    assert {"[worker0] tidying up", "[worker1] tidying up"} <= {*told}
    assert last == "SIGINT: all workers were ended."
    texts = [(logs / f"worker{rank}.log").read_text() for rank in range(2)]
    assert all("in <module>" in text for text in texts)
    assert any("KeyboardInterrupt\n" in text for text in texts)


STUBBORN = """
import signal, sys
from tests.rpc.process_watch import report, pause
port = int(sys.argv[1])
signal.signal(signal.SIGINT, lambda *_: report(port, "asked"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
report(port, "stubborn")
pause()
"""


def test_a_second_interrupt_does_not_wait_for_the_stubborn(start, watch):
    arguments = ["--nproc", 1, "--grace", 10**6, "program.py", watch.port]
    launcher = start(arguments, STUBBORN)
    pids = watch.expect(1)
    launcher.send_signal(signal.SIGINT)
    assert watch.expect(1) == {"asked": pids["stubborn"]}
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=240)
    await_gone(pids.values())
    assert launcher.returncode == 128 + signal.SIGTERM


def test_a_reader_that_goes_away_does_not_stop_the_workers(start, watch, tmp_path):
    program = (
        "import sys\n"
        "from tests.rpc.process_watch import report\n"
        "report(int(sys.argv[1]), 'ready')\n"
        "for number in range(100_000):\n"
        "    print(number)\n"
    )
    arguments = ["--nproc", 1, "--log-dir", tmp_path, "program.py", watch.port]
    launcher = start(arguments, program, PYTHONUNBUFFERED="")
    launcher.stdout.close()
    watch.expect(1)
    errors = launcher.stderr.read().decode()
    assert launcher.wait(timeout=240) == 0
    assert "incomplete: standard output: [Errno 32] Broken pipe" in errors
    lines = (tmp_path / "worker0.log").read_text().splitlines()
    assert lines == [str(number) for number in range(100_000)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("program.py", "the following arguments are required: --nproc"),
        ("--nproc 0 program.py", "--nproc_per_node: must be in 1..65536, not 0"),
        ("--nproc two program.py", "--nproc_per_node: must be in 1..65536, not two"),
        ("--nproc 2 --max-restarts -1 -m x", "max_restarts: must be in 0..65536, not"),
        (
            "--nproc 2 --nnodes 2 --node-rank 0 --master-addr a --max-restarts 2 -m x",
            "`--max-restarts` must be 0 across machines: the launchers do not know of",
        ),
        ("--nproc 2", "the following arguments are required: program"),
        ("--nproc 2 nowhere.py", "`program` must be a file. Got nowhere.py"),
        (
            "--nproc 2 --nnodes 2 --standalone -m x",
            "`--standalone` must be left out wh",
        ),
        ("--nproc 2 --nnodes 2 -m x", "`--node-rank` must be given when there are"),
        ("--nproc 2 --nnodes 2 --node-rank 0 -m x", "`--master-addr` must be given"),
        ("--nproc 2 --node-rank 1 -m x", "`--node-rank` must be below --nnodes, 1"),
        ("--nproc 2 --master-port 0 -m x", "--master_port: must be in 1..65535"),
        ("--nproc 2 --master-port 9 --jax-port 9 -m x", "other than --master-port"),
        ("--nproc 2 --master-port 65535 -m x", "other than --master-port"),
        (
            "--nproc 65536 --nnodes 2 --node-rank 0 --master-addr a -m x",
            "at most 65536 workers in all. Got 65536 x 2",
        ),
        ("--nproc 9 --cores 9999 -m x", "must leave 9 processes cores of their own"),
        ("--nproc 2 --grace nan -m x", "--grace: must be seconds, at least 0, not nan"),
        ("--nproc 2 --grace soon -m x", "must be seconds, at least 0, not soon"),
        ("--nproc 2 -m --no-python x", "not allowed with argument"),
        (
            "--nproc 2 ''",
            "`program` must name a script, a module or a command. Got noth",
        ),
        (f"--nproc 2 {ROOT}/tests", f"`program` must be a file. Got {ROOT}/tests. For"),
        ("--nproc 2 --log-dir= -m x", "--log_dir: must be a path, not nothing"),
        (
            f"--nproc 2 --log-dir {__file__} -m x",
            "--log_dir: must be a folder, not the",
        ),
        ("--nproc 2 --key-file= -m x", "--key-file: must be a path, not nothing"),
        ("--nproc 2 --master-addr= -m x", "or address, without a port, not ''"),
        ("--nproc 2 --master-addr a:2 -m x", "must be a host's name or address, with"),
        ("--nproc 2 --master-addr 'a b' -m x", "without a port, not 'a b'"),
    ],
)
def test_misuse(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(shlex.split(arguments))
    assert message in capsys.readouterr().err


def test_torchruns_spellings():
    """Its options with the same meaning, written in its two ways."""
    lines = (
        "--nproc 2 --node-rank 0 --master-port 7 --log-dir a --max-restarts 3",
        "--nproc-per-node 2 --node_rank 0 --master_port 7 --log_dir a --max_restarts 3",
    )
    ours, theirs = (
        vars(parse([*line.split()[:10], "--no_python", "x", "--y_z"])) for line in lines
    )
    assert ours == theirs
    assert (ours["max_restarts"], ours["arguments"]) == (3, ["--y_z"])
    alone, default = (
        vars(parse([*extra, "--nproc=2", "-m", "x"]))
        for extra in (["--standalone"], [])
    )
    assert alone == default | {"standalone": True}


def test_pinning_gives_each_worker_cores_of_its_own():
    cores = sorted(os.sched_getaffinity(0))
    count = min(2, len(cores))
    options = parse(["--nproc", str(count), "--pin", "-m", "x"])
    cores = [each.cores for each in options.settings]
    assert len(cores) == len(set(cores)) == count
    assert all(len(each) == 1 for each in cores)
    unpinned = parse(["--nproc", "3", "-m", "x"]).settings
    assert [each.cores for each in unpinned] == [(), (), ()]


def test_the_key_of_a_run(tmp_path):
    assert cluster_key(None, 1, {}) != cluster_key(None, 1, {})
    environment = {"JDIST_CLUSTER_KEY": " a secret of some length\n"}
    assert cluster_key(None, 2, environment) == "a secret of some length"
    with pytest.raises(ValueError, match=r"JDIST_CLUSTER_KEY` must be set.*openssl"):
        cluster_key(None, 2, {})
    with pytest.raises(ValueError, match=r"at least 16 bytes\. Got 5 characters"):
        cluster_key(None, 1, {"JDIST_CLUSTER_KEY": "short"})
    file = tmp_path / "cluster.key"
    file.write_text("from the file, not the rest\n")
    file.chmod(0o640)
    with pytest.raises(
        ValueError, match=r"owner alone\. Got mode 640\. Try `chmod 600"
    ):
        cluster_key(file, 1, environment)
    file.chmod(0o400)
    assert cluster_key(file, 1, environment) == "from the file, not the rest"
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(ValueError, match=r"at least 16 bytes\. Got 0 characters"):
        cluster_key(file, 1, environment)
    file.write_bytes(b"\xff" * 32)  # of `openssl rand` without -hex
    for other in (file, tmp_path / "nowhere", tmp_path):
        rule = r"` must be a file of text that can be read\. Got .*\. Make one by"
        with pytest.raises(ValueError, match=re.escape(f"`--key-file {other}") + rule):
            cluster_key(other, 1, environment)


@pytest.mark.parametrize("host", ["fe80::1%eth0", "node-0.local", "10.0.0.1"])
def test_hosts_by_name_and_address(host):
    where = ["--nnodes", "2", "--node-rank", "0", "--master-addr", host]
    assert parse(["--nproc", "2", *where, "-m", "x"]).master_addr == host


def test_what_cannot_start_says_why(launch, tmp_path, watch):
    where = ["--nnodes", 2, "--node-rank", 0, "--master-addr", "10.0.0.1"]
    status, _, errors = launch(["--nproc", 1, *where, "program.py"], "")
    assert status == 2
    assert "error: `JDIST_CLUSTER_KEY` must be set on every machine" in errors
    arguments = ["--nproc", 1, "--master-port", watch.port, "program.py"]
    status, _, errors = launch(arguments, "")
    assert status == 2
    said = "error: `--master-port` must be a port that is free here. Got "
    assert f"{said}{watch.port}: Address already in use. Without --ma" in errors


def test_gloo_does_not_say_that_all_is_well(launch):
    program = (
        "for peers in (1, 0):\n"
        "    print(f'[Gloo] Rank 0 is connected to {peers} peer ranks. '\n"
        "          'Expected number of connected peer ranks is : 1')\n"
    )
    status, output, errors = launch(["--nproc", 1, "program.py"], program)
    assert (status, errors) == (0, "")
    (line,) = output.splitlines()
    assert "connected to 0 peer ranks" in line


def test_the_last_traceback_includes_its_causes():
    trace = "Traceback (most recent call last):"
    link = "During handling of the above exception, another exception occurred:"
    old = [trace, "  an earlier one", "KeyError: 1", "some words"]
    cause = [trace, "  here", "ValueError: 2", "", link, ""]
    assert last_traceback([*old, *cause, trace, "  there", "E: 3"]) == [
        *cause,
        trace,
        "  there",
        "E: 3",
    ]
    group = ["  + Exception Group Traceback (most recent call last):", "  | E: 4"]
    assert last_traceback([*old, *group]) == group
    assert last_traceback(map(str, range(30))) == [str(n) for n in range(10, 30)]
    assert last_traceback([]) == []
