"""What a worker may be told about transfers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc
from jdist.rpc.wire.transfer import Transfer
from jdist.rpc.wire.transfer_port import Port


@pytest.mark.parametrize("name", ["least_bytes", "most_bytes"])
@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_sizes_are_positive(name, number):
    rule = rf"`Transfer\({name}=...\)` must be a positive number of bytes. Got"
    with pytest.raises(ValueError, match=rule):
        Transfer(**{name: number})


@pytest.mark.parametrize("value", [True, {"cpu": True}, Transfer])
def test_the_option_is_a_transfer(value):
    rule = r"`RpcOptions\(transfer=...\)` must be an rpc.Transfer or None"
    with pytest.raises(TypeError, match=rule):
        rpc.RpcOptions(transfer=value)


def test_it_is_off_and_cpu_arrays_go_by_the_wire():
    assert rpc.RpcOptions().transfer is None
    array = jnp.arange(1024, dtype="float32")

    def wants(leaf, **settings):
        return Port(Transfer(**settings), "tester", "127.0.0.1", None).wants(leaf)

    assert wants(array, least_bytes=4096, cpu=True)
    assert not wants(array, least_bytes=4097, cpu=True)
    assert not wants(array, least_bytes=4096)
    assert not wants(np.asarray(array), least_bytes=4096, cpu=True)
