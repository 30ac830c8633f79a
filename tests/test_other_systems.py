"""Windows and macOS, of which the suite runs on neither: what they lack is taken away.

A process without the modules and functions that a system does not have imports every
public face and uses what needs no second process.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jdist import Unavailable, rpc
from jdist.launch.__main__ import main as launch
from jdist.rpc.base import posix

ROOT = Path(__file__).parents[1]

MODULES = {
    "windows": [
        "fcntl", "grp", "posix_openpt", "pty", "pwd", "readline", "resource", "syslog",
        "termios", "tty",
    ],
    "macos": [],
}  # fmt: skip
MISSING = {
    "windows": {
        "os": [
            "chown", "eventfd", "fork", "forkpty", "geteuid", "getpgid", "getpgrp",
            "getppid", "getuid", "killpg", "memfd_create", "nice", "posix_fallocate",
            "pread", "pwrite", "register_at_fork", "sched_getaffinity",
            "sched_getscheduler", "sched_param", "sched_setaffinity",
            "sched_setscheduler", "sched_yield", "setsid", "statvfs", "sysconf",
            "uname", "waitid", "O_ASYNC", "O_CLOEXEC", "MFD_CLOEXEC", "SCHED_BATCH",
            "SCHED_OTHER", "WNOHANG",
        ],
        "signal": [
            "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGSTOP", "SIGUSR1",
            "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt",
        ],
        "socket": [
            "AF_UNIX", "CMSG_LEN", "CMSG_SPACE", "MSG_CMSG_CLOEXEC", "MSG_DONTWAIT",
            "SCM_RIGHTS", "SO_PEERCRED", "SO_REUSEPORT", "socketpair",
        ],
        "select": ["epoll", "poll"],
        "mmap": ["MAP_PRIVATE", "MAP_SHARED", "PROT_READ", "PROT_WRITE"],
    },
    "macos": {
        "os": [
            "eventfd", "memfd_create", "posix_fadvise", "sched_getaffinity",
            "sched_getscheduler", "sched_param", "sched_setaffinity",
            "sched_setscheduler", "MFD_ALLOW_SEALING", "MFD_CLOEXEC", "SCHED_BATCH",
            "SCHED_OTHER",
        ],
        "signal": ["SIGPWR", "sigtimedwait", "sigwaitinfo"],
        "socket": ["MSG_CMSG_CLOEXEC", "SO_PEERCRED"],
        "select": ["epoll"],
        "fcntl": ["F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SETSIG"],
    },
}  # fmt: skip

PROGRAM = """
import contextlib, importlib, sys
# What they need themselves they have on every system.
import asyncio, concurrent.futures, multiprocessing.spawn, ssl, subprocess, tempfile
import jax, jax.numpy as jnp, msgspec, numpy as np, rich.console, uuid

MODULES, MISSING, FACES = {given}
for module in MODULES:
    sys.modules[module] = None  # `import` raises ImportError
for module, names in MISSING.items():
    for name in names:
        with contextlib.suppress(AttributeError):
            delattr(importlib.import_module(module), name)
for face in FACES:
    importlib.import_module(face)

from jdist import autograd, data_parallel, optim, pipeline, rpc, verify


def losses(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2


w, rng = jnp.array([0.3, -0.4, 0.5]), np.random.default_rng(3)
batch = {{"x": rng.normal(size=(7, 3)), "y": rng.normal(size=7)}}
batch = jax.tree.map(np.float32, batch)
split = data_parallel.value_and_grad(losses, replicas=2)
shards, weights = data_parallel.shard_batch(batch, replicas=2, sizes=(5, 2))
uneven = {{"5 + 2": lambda w, _: split(w, shards, weights)}}
assert verify.gradients(losses, w, batch, uneven).ok

stage = pipeline.Stage(lambda w, x: x @ w, ("x",), ("out",))
pipe = pipeline.Pipeline(
    [stage], lambda out, batch: (out - batch["y"]) ** 2, pipeline.gpipe(1, 3),
    optimizer=optim.adam(lr=0.1),
)
state, metrics = pipe.train_step(pipe.init([w]), batch)
np.testing.assert_allclose(metrics.loss, losses(w, batch).mean(), rtol=1e-5)

with rpc.local_cluster(["a", "b"]):
    assert rpc.rpc_sync("b", max, args=(3, 5)) == 5
    v = autograd.variable(w)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", jnp.tanh, args=(v,))
        autograd.backward(context, [autograd.apply(jnp.sum, y)])
        found = autograd.get_gradients(context)[v]
    np.testing.assert_allclose(found, 1 - np.tanh(w) ** 2, rtol=1e-5)
print("works")
"""


def faces():
    """The modules of the reference, and the commands."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    lines = [line for page in pages for line in page.read_text().splitlines()]
    found = [x.split()[-1] for x in lines if x.startswith(".. automodule::")]
    assert len(found) > 10
    commands = ["launch", "verify", "targets"]
    return [*found, *(f"jdist.{command}.__main__" for command in commands)]


@pytest.mark.parametrize("system", MISSING)
def test_a_system_that_lacks_them(system, tmp_path):
    """Every face is imported, and what is in one process works."""
    given = (MODULES[system], MISSING[system], faces())
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(given=repr(given)))
    # Not the suite's precision and promotions.
    own = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**own, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr


def test_on_windows_other_processes_are_refused_in_words(monkeypatch, capsys):
    """With what to do instead."""
    said = r"needs Linux, macOS or another POSIX system\. Got .*WSL.*`rpc.local_clus"
    monkeypatch.setattr(posix, "os", SimpleNamespace(name="nt"))
    with pytest.raises(Unavailable, match=f"^`init_rpc` {said}"):
        rpc.init_rpc("a", rank=0, world_size=2, coordinator="127.0.0.1:29511")
    with pytest.raises(Unavailable, match=f"^`spawn` {said}"):
        rpc.spawn(max, args=(3, 5))
    assert launch(["--nproc", "2", __file__]) == 2
    assert "`python -m jdist.launch` needs Linux" in capsys.readouterr().err
