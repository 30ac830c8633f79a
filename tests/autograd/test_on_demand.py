"""A worker's autograd is set up when the package is imported, or at first need."""

import os
import subprocess
import sys

import pytest

from jdist import rpc
from jdist.autograd.contexts import here
from jdist.autograd.rpc_hooks import META
from jdist.rpc.base import current
from jdist.rpc.calls.callee import NEEDS
from jdist.rpc.codec.codec import MessageContext
from jdist.rpc.wire.frame import CALL
from tests.autograd.recording_cases import add
from tests.rpc.hosts import names

SCRIPT = """
import sys
import numpy as np
from jdist import rpc

def double(x):
    return x * 2.0

def has_it():
    return "jdist.autograd" in sys.modules

def recorded(context_id):
    from jdist import autograd
    found = autograd.retrieve_context(context_id)
    return len(found.send_functions()), len(found.recv_functions())

def body(rank):
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        assert not rpc.rpc_sync("worker1", has_it)
        assert not has_it()
        from jdist import autograd  # after the worker was made
        assert not rpc.rpc_sync("worker1", has_it)
        w = autograd.variable(np.arange(3.0))
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", double, args=(w,))
            assert isinstance(y, autograd.Recorded), y
            assert rpc.rpc_sync("worker1", recorded, args=(context_id,)) == (1, 1)
        assert rpc.rpc_sync("worker1", has_it)
    rpc.shutdown()

if __name__ == "__main__":
    rpc.spawn(body, nprocs=2)
"""


def test_a_callee_that_has_not_imported_it(tmp_path):
    """The message says what it needs, and the callee imports it."""
    script = tmp_path / "needs.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_workers_made_later_have_it():
    with rpc.local_cluster(names(2)):
        assert isinstance(
            current.worker().extension_state["jdist.autograd"].ids.worker, int
        )
        with rpc.use_worker("worker1"):
            assert current.worker().extension_state["jdist.autograd"].ids.worker == 1


@pytest.mark.parametrize(
    "row",
    [
        None, 5, [], [1, 2, 3], [1, 0, 1, 0, 5], [1, 0, 1, 0, {-1: 1}],
        [1, 0, 1, 0, {1: 1 << 64}], ["a", 0, 1, 0, {}], [1 << 64, 0, 1, 0, {}],
        [True, 0, 1, 0, {}], [1, 0, 1, -1, {}], [1, 0, 1, 0, []],
    ],
)  # fmt: skip
def test_malformed_metadata_is_refused(threads, row):
    body = (add, (1.0, 2.0), {})
    meta = {META: row} if row is not None else {META: "text"}
    with pytest.raises(rpc.ProtocolError, match="autograd part of a message is malf"):
        current.worker().call("worker1", CALL, body, meta=meta)
    with rpc.use_worker("worker1"):
        assert not here().contexts()


@pytest.mark.parametrize("row", [(2, 1.0), (-1, 1.0), (True, 1.0), ("0", 1.0)])
def test_a_slot_belongs_to_its_message(threads, row):
    context_id = (1 << 48) + 5
    boundary = current.worker().interceptor
    message = MessageContext(
        rpc.WorkerInfo("worker1", 1, incarnation=1), {META: [context_id, 0, 9, 2, {}]}
    )
    assert boundary.take((1, 7.0), message).edge.index == 1
    with pytest.raises(rpc.ProtocolError, match="has a slot of its message"):
        boundary.take(row, message)
    for wrong in (message.worker, None):
        outside = None if wrong is None else MessageContext(wrong)
        with pytest.raises(rpc.ProtocolError, match="belongs to a context"):
            boundary.take(row, outside)
    assert boundary.take(7.0, None) == 7.0


def test_a_part_that_is_not_allowed_is_not_imported(threads):
    meta = {NEEDS: "os:system"}
    with pytest.raises(rpc.ForbiddenFunction, match="module that other workers may"):
        current.worker().call("worker1", CALL, (add, (1.0, 2.0), {}), meta=meta)
