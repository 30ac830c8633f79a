"""The identity of a call, on which all workers agree before they exchange values.

Workers pair their calls by counting them. Counting alone pairs a training step with an
evaluation, or batch t with batch t + 1, where one worker has left a call out; so every
message says what its sender is doing, and with which data.
"""

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.pipeline.run.micro_batch import MicroBatch

SAMPLE = 1024
"""Elements of an array that its checksum covers, so that its cost has a bound."""


class CallIdentity(NamedTuple):
    """Method, step, sizes and checksums of a call; equal on all its workers.

    Attributes:
      kind: The public method, such as "train_step".
      step: Of the training state that it was given; None without one.
      examples: Of the batch.
      micro_batches: Into which it is cut.
      settings: What else was given that concerns all workers, by name.
      checksums: Of a sample of each array, by what it is. Only those that both sides
        have are compared: a worker's batch may lack what its stages do not take.
    """

    kind: str
    step: int | None = None
    examples: int | None = None
    micro_batches: int | None = None
    settings: Mapping[str, PyTree] = MappingProxyType({})
    checksums: Mapping[str, int] = MappingProxyType({})

    def plain(self) -> list[PyTree]:
        """The fields, made of what the metadata of a message can carry."""
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
        """Refuses to work with a worker that does something else.

        Args:
          name: Of this worker.
          other: What the other worker says.
          name_of_other: Its name.

        Raises:
          ValueError: It is in another call, or was given another batch.
        """
        if self[:5] != other[:5]:
            rule = "must be called by all workers alike"
            got = f"{self} on {name!r}, {other} on {name_of_other!r}"
            remedy = "All workers have made this call in vain and are in step again: "
            remedy += "repeat the batch on all of them, or on none."
            raise ValueError(requirement(self.kind, rule, got, remedy))
        common = self.checksums.keys() & other.checksums.keys()
        differ = [x for x in sorted(common) if self.checksums[x] != other.checksums[x]]
        if differ:
            rule = "must be given the same batch, weights and key on all workers"
            got = f"another {' and '.join(differ)} on {name!r} than on "
            got += f"{name_of_other!r}, in {self}"
            remedy = "Read the data in one order on all workers; leave out of a "
            remedy += "worker's batch what its stages do not take."
            raise ValueError(requirement(self.kind, rule, got, remedy))


def sized(
    identity: CallIdentity,
    batches: Iterable[Mapping[str, PyTree]],
    parts: Sequence[MicroBatch],
    key: jax.Array | None = None,
) -> CallIdentity:
    """The identity of a call with the data that it works on.

    Args:
      identity: Its kind, step and settings.
      batches: All entries of the batch; of an epoch one after the other.
      parts: The micro-batches into which they are cut.
      key: The PRNG key, or None.

    Example:
      >>> from jdist.pipeline.run.micro_batch import split_batch
      >>> batch = {"x": np.arange(5.0)}
      >>> parts = split_batch(batch, None, 2, "mean")
      >>> made = sized(CallIdentity("evaluate"), [batch], parts)
      >>> str(made), list(made.checksums)
      ('evaluate with 5 examples in 2 micro-batches', ["entry 'x'", 'weights'])
    """
    checksums: dict[str, int] = {}
    for batch in batches:
        _add_entries(checksums, batch)
    for part in parts:
        _add(checksums, "weights", part.weights)
    if key is not None:
        _add(checksums, "key", key)
    return identity._replace(
        examples=sum(len(part.weights) for part in parts),
        micro_batches=len(parts),
        checksums=checksums,
    )


def chained(checksums: Mapping[str, int], part: MicroBatch) -> dict[str, int]:
    """The checksums of micro-batches, and of another one.

    Args:
      checksums: Of those before it.
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
        # Against mistakes, not against forgery: the fastest checksum serves.
        checksums[name] = zlib.crc32(sample.tobytes(), checksums.get(name, 0))


def _sample(array: object) -> np.ndarray | None:
    """Elements at places that depend on the size alone; all of a small array.

    None for what has no bytes that are the same in another process.
    """
    if isinstance(array, jax.Array):
        # Parts of it are on other processes' devices.
        if not array.is_fully_addressable:
            return None
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            array = jax.random.key_data(array)
        if array.size > SAMPLE:
            # Gathered on the device: a few kilobytes come to the host, not the array.
            return np.asarray(_taken(array, _places(array.size)))
    found = np.asarray(array)
    # The bytes of an array of objects are addresses.
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
    """Random, because images have empty borders and rows repeat."""
    return np.sort(np.random.default_rng(size).integers(0, size, SAMPLE))
