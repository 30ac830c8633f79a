"""Padding of batches to few sizes, so that few programs are compiled.

NumPy adds and cuts the rows: on a device each size would compile a program.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jdist._compat import is_traced, placed
from jdist._errors import requirement
from jdist._lru_cache import LRUCache
from jdist._tree import PyTree, path_of
from jdist.autograd.recording.node import (
    Cotangent,
    Edge,
    Node,
    SegmentNode,
    next_order,
)
from jdist.autograd.recording.pure import Recordable
from jdist.autograd.recording.recorded import Recorded, record

_CALL = "apply(pad=...)"


@dataclass(frozen=True, slots=True)
class PadTo:
    """The sizes to which batches are padded; made by `pad_to`.

    Attributes:
      multiple: A number to whose next multiple a batch is padded; or None.
      buckets: Otherwise the sizes, in ascending order.
      args: Positions of the arguments whose first dimension is the batch; None for all.
    """

    multiple: int | None
    buckets: tuple[int, ...]
    args: tuple[int, ...] | None

    def size(self, rows: int) -> int:
        """Returns the size to which a batch of `rows` examples is padded.

        Raises:
          ValueError: No bucket is large enough; or there is no example to repeat.
        """
        if not rows:
            rule = "must have an example, which is repeated"
            raise ValueError(requirement(_CALL, rule, "a batch of 0 examples"))
        if self.multiple is not None:
            return -(-rows // self.multiple) * self.multiple
        found = next((size for size in self.buckets if size >= rows), None)
        if found is None:
            largest = self.buckets[-1]
            rule = f"must have a size for every batch, and the largest is {largest}"
            raise ValueError(requirement(_CALL, rule, f"a batch of {rows} examples"))
        return found


def pad_to(sizes: int | Iterable[int], args: Iterable[int] | None = None) -> PadTo:
    """Pads the batches of one `apply`, so that ragged data do not compile each time.

        losses = autograd.apply(fn, w, x, y, pad=autograd.pad_to(16))

    The first dimension of every array and recorded value among the arguments is taken
    for the batch, but not that of variables, nor what has no dimensions. The last
    example is repeated up to the next size, and what the function returns is cut to the
    examples that were given. The cotangent of repeated ones, zero for a function that
    treats examples independently, is added to that of the example itself.

    Value and gradient are those of the batch without padding, but for the order in
    which a sum over more rows adds up, if the function treats its examples
    independently: row i of every output depends on row i of the inputs alone, and on
    the variables. One that does not, such as `x - x.mean(0)` or batch normalization,
    sees the repeated examples. It is refused: at the uses 1, 2, 4, 8, ... of each size
    the function runs a second time, with another example repeated, and the outputs of
    the given examples must have the same bits. Reduce over the batch outside,
    `apply(fn, w, x, pad=...).mean()`. To compile nothing for that either, begin the
    backward pass with the losses:
    `backward(context_id, [losses], cotangents=[np.full(n, 1 / n, np.float32)])`.

    Args:
      sizes: A number, to whose next multiple a batch is padded; or several, the sizes
        themselves.
      args: Positions of the arguments that are batches, where others have arrays too
        (keyword arguments are none then); None for all.

    Returns:
      What `apply` takes as `pad`.

    Raises:
      TypeError, ValueError: The sizes are no positive integers; a position is none.

    `apply` raises ValueError where arguments have different first dimensions, where
    there is no size for a batch, and where an output is not of one example each: its
    first dimension is not the padded batch's, or it depends on other examples.
    TypeError for arrays that are traced, or are keys.

    Example:
      >>> import numpy as np
      >>> from jdist import autograd
      >>> w = autograd.variable(np.float32(2))
      >>> def losses(w, x):
      ...     return (w * x).sum(1)
      >>> for rows in (3, 5, 8):  # compiled once
      ...     x = np.ones((rows, 2), np.float32)
      ...     print(autograd.apply(losses, w, x, pad=autograd.pad_to(8)))
      Recorded(float32[3] of cut)
      Recorded(float32[5] of cut)
      Recorded(float32[8] of losses)
    """
    call = "pad_to(sizes)"
    single = isinstance(sizes, int | np.integer)
    given: list[Any] = [sizes] if single else _listed(call, sizes)
    if not given or not all(_is_integer(size, 1) for size in given):
        rule = "must be a positive integer, or several"
        raise ValueError(requirement(call, rule, sizes))
    places = None if args is None else tuple(_listed("pad_to(args=...)", args))
    if places is not None and not all(_is_integer(place, 0) for place in places):
        rule = "must be positions of arguments, from 0"
        raise ValueError(requirement("pad_to(args=...)", rule, args))
    buckets = () if single else tuple(sorted({int(size) for size in given}))
    return PadTo(int(given[0]) if single else None, buckets, places)


def padded(
    fn: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> PyTree:
    """Runs `apply` with `pad` among the keyword arguments: see `pad_to`."""
    pad: PadTo = kwargs["pad"]
    rest = {name: value for name, value in kwargs.items() if name != "pad"}
    _check_places(pad, len(args))
    batches = {
        _position(keys): leaf
        for keys, leaf in jax.tree.leaves_with_path((list(args), rest))
        if _is_batch(pad, keys, leaf)
    }
    rows = _rows(batches)
    size = pad.size(rows)

    def run(repeated: int) -> PyTree:
        """Returns the outputs with the example of this number repeated."""

        def resized(keys: KeyPath, leaf: PyTree) -> PyTree:
            is_batch = _is_batch(pad, keys, leaf)
            return _resized(leaf, size, repeated) if is_batch else leaf

        given = jax.tree.map_with_path(resized, (list(args), rest))
        return record(fn, given[0], given[1])

    outputs = run(-1)
    for keys, leaf in jax.tree.leaves_with_path(outputs):
        _check_output(keys, leaf, size)
    # Without repeated examples there is nothing that an output could depend on.
    if rows < size:
        _check_independence(fn, run, outputs, rows, list(batches.values()))
    return jax.tree.map(lambda leaf: _resized(leaf, rows), outputs)


# How often a function was used at a size with distinct examples.
_USES: LRUCache[Hashable, int] = LRUCache(256)


def _check_independence(
    fn: Callable[..., PyTree],
    run: Callable[[int], PyTree],
    outputs: PyTree,
    rows: int,
    batches: Sequence[PyTree],
) -> None:
    """Checks that the outputs of given examples do not depend on repeated ones.

    Args:
      fn: The function.
      run: `run(number)` returns the outputs where that example is repeated.
      outputs: What `run(-1)` returned.
      rows: Number of given examples.
      batches: The batches among the arguments.

    Raises:
      ValueError: An output has other bits.
    """
    leaves = jax.tree.leaves(outputs)
    node = next((x.edge.node for x in leaves if isinstance(x, Recorded)), None)
    # Without a history, as of an `argmax`, the code stands for the function.
    function: Hashable = getattr(fn, "__code__", fn)
    if isinstance(node, SegmentNode):
        function = node.plan
    shapes = [(len(x), *x.shape[1:]) for x in leaves]
    case = (function, *shapes, *[(x.shape[1:], x.dtype) for x in batches])
    # Equal examples in both places prove nothing, and count as no use.
    if not any(_bits(x, 0) != _bits(x, -1) for x in batches):
        return
    uses = (_USES.get(case) or 0) + 1
    # At the uses 1, 2, 4, 8, ... with distinct examples. Once is not enough: a gate
    # that begins at zero lets nothing of other examples through at first.
    if uses & (uses - 1) == 0:
        _refuse_dependence(run, outputs, rows)
    # Behind the check: one that refuses is made again at the next use.
    _USES.put(case, uses)


def _refuse_dependence(
    run: Callable[[int], PyTree], outputs: PyTree, rows: int
) -> None:
    changed = _changed(outputs, run(0), rows)
    # A function that is not deterministic, on some GPUs, proves nothing.
    if changed is not None and _changed(outputs, run(-1), rows) is None:
        rule = "must be of a function that treats its examples independently"
        remedy = "Reduce over the batch outside of `apply`, or without padding."
        raise ValueError(requirement(_CALL, rule, changed, remedy))


def _changed(outputs: PyTree, others: PyTree, rows: int) -> str | None:
    """Describes the first output of a given example whose bits differ, or None."""
    pairs = zip(
        jax.tree.leaves_with_path(outputs), jax.tree.leaves(others), strict=True
    )
    for (keys, one), other in pairs:
        before, after = _numbers(one), _numbers(other)
        for row in range(rows):
            if before[row].tobytes() != after[row].tobytes():
                return (
                    f"an output at {path_of(keys)} that for example {row} depends on "
                    "other examples"
                )
    return None


def _numbers(leaf: PyTree) -> np.ndarray:
    return np.asarray(leaf.value if isinstance(leaf, Recorded) else leaf)


def _bits(batch: PyTree, row: int) -> bytes:
    return _numbers(batch)[row].tobytes()


class ResizedNode(Node):
    """Adds or cuts rows of a value; its pullback does the reverse.

    Args:
      name: Shown in messages and pictures.
      edge: Edge of the value.
      rows: Its length.
      repeated: Which of its rows the added ones repeat.
    """

    __slots__ = ("_repeated", "_rows")

    def __init__(self, name: str, edge: Edge, rows: int, repeated: int) -> None:
        super().__init__(name, (edge,), 1, next_order())
        self._rows = rows
        self._repeated = repeated

    def pull(self, cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """See `Node`. The cotangent of cut rows is zero."""
        (cotangent,) = cotangents
        # By NumPy: on a device each number of rows would compile a program.
        added = np.asarray(cotangent)[self._rows :]
        if not added.any():  # as of every function that treats examples independently
            return [_of_length(cotangent, self._rows, None)]
        # A function such as `x - x.max(0)` has the same outputs and passes the check.
        own = np.array(cotangent)[: self._rows]
        # The added rows are this row: their cotangents are summands of its own.
        own[self._repeated] += added.sum(0, dtype=own.dtype)
        return [_placed_like(cotangent, own)]


def _resized(leaf: PyTree, rows: int, repeated: int = -1) -> PyTree:
    """Resizes a value to `rows` rows, recorded if it is; repeats the row `repeated`."""
    if len(leaf) == rows:
        return leaf
    if not isinstance(leaf, Recorded):
        return _of_length(leaf, rows, repeated)
    name = "cut" if rows < len(leaf) else "pad"
    node = ResizedNode(name, leaf.edge, len(leaf), repeated)
    return Recorded(_of_length(leaf.value, rows, repeated), Edge(node, 0))


def _of_length(array: PyTree, rows: int, repeated: int | None = -1) -> PyTree:
    """Cuts an array, or extends it by one of its rows or by zeros."""
    own = np.asarray(array)
    found = own[:rows]
    if rows > len(own):
        shape = (rows - len(own), *own.shape[1:])
        more = np.zeros(shape, own.dtype)
        if repeated is not None:
            more[:] = own[repeated]
        found = np.concatenate([own, more])
    return _placed_like(array, found)


def _placed_like(array: PyTree, found: np.ndarray) -> PyTree:
    if not isinstance(array, jax.Array):
        return found
    if array.committed:
        return jax.device_put(found, array.sharding)
    # A copy, because JAX takes over the memory.
    return placed(np.array(found, order="C"), None)


def _is_batch(pad: PadTo, keys: KeyPath, leaf: PyTree) -> bool:
    """Whether the first dimension of a leaf of `(args, kwargs)` is the batch."""
    if pad.args is not None and (keys[0].idx or keys[1].idx not in pad.args):
        return False
    if isinstance(leaf, Recordable):
        return isinstance(leaf, Recorded) and leaf.ndim > 0
    if not isinstance(leaf, jax.Array | np.ndarray) or not leaf.ndim:
        return False
    if is_traced(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        rule = "must be given arrays of numbers that are there, not traced ones or keys"
        got = f"{leaf} at {_position(keys)}"
        raise TypeError(requirement(_CALL, rule, got))
    return True


def _position(keys: KeyPath) -> str:
    """Describes the position of a leaf of `(args, kwargs)`."""
    which = getattr(keys[1], "key", getattr(keys[1], "idx", ""))
    inner = f"/{path_of(keys[2:])}" if keys[2:] else ""
    return f"argument {which}{inner}"


def _rows(batches: Mapping[str, PyTree]) -> int:
    rows = {name: len(leaf) for name, leaf in batches.items()}
    if not rows:
        rule = "must have an argument with a first dimension, the batch"
        raise ValueError(requirement(_CALL, rule, "none"))
    if len(set(rows.values())) > 1:
        rule = "must have the same number of examples in all arguments"
        got = ", ".join(f"{count} in {name}" for name, count in rows.items())
        remedy = (
            "What is no batch is a variable, has no dimensions, or is not among "
            "`pad_to(..., args=...)`."
        )
        raise ValueError(requirement(_CALL, rule, got, remedy))
    return next(iter(rows.values()))


def _check_output(keys: KeyPath, leaf: PyTree, size: int) -> None:
    shape = getattr(leaf, "shape", ())
    if not shape or shape[0] != size:
        rule = "must be of a function that treats its examples independently, and "
        rule += "keeps their dimension first"
        got = f"an output of shape {tuple(shape)} at {path_of(keys)} "
        got += f"for {size} padded examples"
        remedy = "Reduce over the batch outside of `apply`, or without padding."
        raise ValueError(requirement(_CALL, rule, got, remedy))


def _check_places(pad: PadTo, count: int) -> None:
    beyond = [place for place in pad.args or () if place >= count]
    if beyond:
        rule = f"must be positions of the {count} arguments"
        raise ValueError(requirement("pad_to(args=...)", rule, beyond))


def _listed(call: str, values: object) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(requirement(call, "must be an integer or several", values))
    return list(values)


def _is_integer(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= least)
