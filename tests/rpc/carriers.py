"""Ways from one worker to another, without a transport: what tests send values by."""

import dataclasses
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

from jdist.rpc.wire import frame as framing
from jdist.rpc.wire.frame import Frame
from jdist.rpc.wire.in_process import adopt

LIMITS = framing.Limits()


def by_wire(tree, leaves, device=None):
    """Through bytes and back."""
    received = receive(framing.pack(Frame("call", 1, {}, tree, leaves)), device)
    return received.tree, received.leaves


def by_descriptors(tree, leaves, device=None):
    """Through bytes, every leaf apart from them."""
    pieces, apart = pack_apart(Frame("call", 1, {}, tree, leaves))
    received = receive(pieces, device, apart)
    return received.tree, received.leaves


def in_process(tree, leaves, device=None):
    """Within one process."""
    return tree, [adopt(leaf, device) for leaf in leaves]


CARRIERS = [by_wire, by_descriptors, in_process]


def pack_apart(frame, least=1):
    """The pieces of a frame, and apart from them its leaves of so many bytes."""
    apart = []

    def take(leaf):
        if len(leaf) < least:
            return False
        apart.append(leaf)
        return True

    small = min(framing._SMALL, least)
    with unittest.mock.patch.object(framing, "_SMALL", small):
        return framing.pack(frame, apart=take), apart


def parts(pieces, limits=LIMITS):
    """The header in what is sent, the slab and the large leaves."""
    head, *large = pieces
    begin = framing.PREFIX_BYTES
    end = begin + framing.parse_prefix(head[:begin], limits)
    return [framing.parse_header(head[begin:end], limits), head[end:], *large]


def receive(pieces, device=None, apart=(), limits=LIMITS):
    """What a transport does with the bytes that reach it."""
    header, *body = parts(pieces, limits)
    layout, buffers = framing.allocate(header, limits)
    stream = b"".join(body)
    assert len(stream) == sum(map(len, buffers))
    assert layout.apart == [len(leaf) for leaf in apart]
    for buffer in buffers:
        buffer[:] = stream[: len(buffer)]
        stream = stream[len(buffer) :]
    behind = [memoryview(bytearray(leaf)) for leaf in apart]
    return framing.assemble(header, layout, buffers, device, behind)


def assert_same(got, sent):
    """Equal in type, structure, order, dtype, shape and every bit."""
    if isinstance(sent, jax.Array):
        assert isinstance(got, jax.Array)
        assert got.dtype == sent.dtype
        if jnp.issubdtype(sent.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(got) == jax.random.key_impl(sent)
            got, sent = map(jax.random.key_data, (got, sent))
        assert got.weak_type == sent.weak_type
        assert_same(np.asarray(got).copy(), np.asarray(sent).copy())
        return
    assert type(got) is type(sent)
    if isinstance(sent, np.ndarray | np.generic):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.tobytes() == sent.tobytes()
    elif isinstance(sent, dict):
        assert_same(list(got.items()), list(sent.items()))
    elif isinstance(sent, tuple | list):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(sent) and not isinstance(sent, type):
        for field in dataclasses.fields(sent):
            assert_same(getattr(got, field.name), getattr(sent, field.name))
    elif isinstance(sent, float):
        assert np.float64(got).tobytes() == np.float64(sent).tobytes()
    else:
        assert got == sent
