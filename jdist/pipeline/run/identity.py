"""The identity of a call, which all workers compare before they exchange values.

Workers pair their calls by counting them. If one worker has left a call out, counting
alone pairs a training step with an evaluation, or batch t with batch t + 1. Therefore
every message carries the kind of its sender's call and checksums of the data.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import value_error
from jdist._tree import PyTree
from jdist.pipeline.run.micro_batch import MicroBatch

SAMPLE = 1024
"""Elements of an array that its checksum covers, so that its cost has a bound."""


class CallIdentity(NamedTuple):
    """Method, step, sizes and checksums of a call; equal on all its workers.

    Attributes:
      kind: The public method, such as "train_step".
      step: Step of the training state; None without one.
      examples: Number of examples of the batch.
      micro_batches: Number of micro-batches.
      settings: Other arguments that must be equal on all workers, by name.
      checksums: Checksum of a sample of each array, by its description. Only those
        that both sides have are compared.
    """

    kind: str
    step: int | None = None
    examples: int | None = None
    micro_batches: int | None = None
    settings: Mapping[str, PyTree] = MappingProxyType({})
    checksums: Mapping[str, int] = MappingProxyType({})

    def plain(self) -> list[PyTree]:
        """The fields as types that the metadata of a message can carry."""
        return [*self[:4], dict(self.settings), dict(self.checksums)]

    def __str__(self) -> str:
        text = self.kind
        if self.step is not None:
            text += f" of step {self.step}"
        if self.examples is not None:
            text += f" with {self.examples} examples in {self.micro_batches} "
            text += "micro-batches"
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{text} ({given})" if given else text

    def check(self, name: str, other: "CallIdentity", name_of_other: str) -> None:
        """Compares the identity with that of another worker.

        Args:
          name: Name of this worker.
          other: The identity that the other worker sent.
          name_of_other: Name of the other worker.

        Raises:
          ValueError: It is in another call, or was given another batch.
        """
        if self[:5] != other[:5]:
            rule = "must be called by all workers alike"
            got = f"{self} on {name!r}, {other} on {name_of_other!r}"
            remedy = "The call failed on all workers, which are in step again: "
            remedy += "repeat the batch on all of them, or on none."
            raise value_error(self.kind, rule, got, remedy)
        # A process need not load entries that its stages do not take.
        common = self.checksums.keys() & other.checksums.keys()
        differ = [x for x in sorted(common) if self.checksums[x] != other.checksums[x]]
        if differ:
            rule = "must be given the same batch, weights and key on all workers"
            got = f"another {' and '.join(differ)} on {name!r} than on "
            got += f"{name_of_other!r}, in {self}"
            remedy = "Read the data in one order on all workers; leave out of a "
            remedy += "worker's batch what its stages do not take."
            raise value_error(self.kind, rule, got, remedy)


class CallArguments(NamedTuple):
    """The arguments of a call that must be equal on all its workers.

    Attributes:
      step: Step of the training state; None without one.
      settings: Numbers and texts, by name.
      batch: The batch, of an epoch the first one.
      parts: The micro-batches into which it is cut.
      key: The PRNG key, or None.
    """

    step: int | None = None
    settings: Mapping[str, PyTree] = MappingProxyType({})
    batch: Mapping[str, PyTree] = MappingProxyType({})
    parts: Sequence[MicroBatch] = ()
    key: jax.Array | None = None


def identity_of(kind: str, given: CallArguments) -> CallIdentity:
    """The identity of a call, with sizes and checksums of its data.

    Args:
      kind: The public method.
      given: Its arguments.

    Example:
      >>> from jdist.pipeline.run.micro_batch import split_batch
      >>> batch = {"x": np.arange(5.0)}
      >>> parts = split_batch(batch, None, 2, "mean")
      >>> made = identity_of("evaluate", CallArguments(batch=batch, parts=parts))
      >>> str(made), list(made.checksums)
      ('evaluate with 5 examples in 2 micro-batches', ["entry 'x'", 'weights'])
    """
    step = None if given.step is None else int(given.step)
    texts = {name: str(value) for name, value in given.settings.items()}
    if not given.parts:
        return CallIdentity(kind, step, settings=texts)
    checksums: dict[str, int] = {}
    _add_entries(checksums, given.batch)
    for part in given.parts:
        _add(checksums, "weights", part.weights)
    if given.key is not None:
        _add(checksums, "key", given.key)
    examples = sum(len(part.weights) for part in given.parts)
    return CallIdentity(kind, step, examples, len(given.parts), texts, checksums)


def chained(checksums: Mapping[str, int], part: MicroBatch) -> dict[str, int]:
    """Extends the checksums of a stream by its next micro-batch.

    Args:
      checksums: Checksums of the micro-batches before it.
      part: The micro-batch.
    """
    found = dict(checksums)
    _add_entries(found, part.batch)
    _add(found, "weights", part.weights)
    return found


def _add_entries(checksums: dict[str, int], batch: Mapping[str, PyTree]) -> None:
    for name, entry in batch.items():
        for leaf in jax.tree.leaves(entry):
            _add(checksums, f"entry {name!r}", leaf)


def _add(checksums: dict[str, int], name: str, array: object) -> None:
    sample = _sample(array)
    if sample is not None:
        # A checksum against mistakes, not forgery, need not be cryptographic. It
        # continues the earlier one of this name, so that the order of arrays counts.
        checksums[name] = zlib.crc32(sample.tobytes(), checksums.get(name, 0))


def _sample(array: object) -> np.ndarray | None:
    """A sample of an array's elements; all of a small array.

    None for an array whose bytes are not comparable between processes.
    """
    if isinstance(array, jax.Array):
        # A part of it is on devices of other processes.
        if not array.is_fully_addressable:
            return None
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            array = jax.random.key_data(array)
        if array.size > SAMPLE:
            # Gathered on the device, to transfer a few kilobytes and not the array.
            return np.asarray(_taken(array, _places(array.size)))
    found = np.asarray(array)
    # The bytes of an array of objects are addresses, which differ between processes.
    if found.dtype.hasobject:
        return None
    if found.size <= SAMPLE:
        return found
    if found.flags.c_contiguous:  # `flat` takes 10 times as long.
        return found.reshape(-1)[_places(found.size)]
    return found.flat[_places(found.size)]


@jax.jit
def _taken(array: jax.Array, places: np.ndarray) -> jax.Array:
    return array.reshape(-1)[places]


@functools.lru_cache(maxsize=256)
def _places(size: int) -> np.ndarray:
    """Random indices, the same for all arrays of a size."""
    # Random, because images have empty borders and rows of data repeat. The seed is
    # the size, so that all processes sample the same elements.
    return np.sort(np.random.default_rng(size).integers(0, size, SAMPLE))
