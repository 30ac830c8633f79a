"""The format of a tree: the codes that begin its lists, and the names of dtypes.

A tree is None, bool, int (64 bit), float, str, bytes, or a list that begins with a
code. "Tree" stands for any tree below, "name" for `module:qualname`:

    LEAF          index of an array of the frame
    TUPLE         tree, ...                LIST, SET, FROZENSET likewise
    DICT          key tree, value tree, ...            ORDERED_DICT likewise
    DEFAULT_DICT  factory tree, key tree, value tree, ...
    BIG_INT       bytes tree: little-endian, signed
    COMPLEX       real part, imaginary part
    RANGE         start, stop, step: trees             SLICE likewise
    ELLIPSIS
    BYTES         index of a leaf of uint8: long bytes
    TEXT          index of a leaf of uint8: long or unusual text as UTF-8
    BYTE_ARRAY    bytes tree
    SCALAR        dtype, bytes: a NumPy scalar
    DTYPE         dtype                    DTYPE_CLASS: the class of its scalars
    KEY           implementation, tree of its data: an array of PRNG keys
    REFERENCE     name of a function or class
    METHOD        owner tree, name within its class
    PARTIAL       function, tuple, dict: trees; a functools.partial
    DATACLASS     name, then field name, tree, ...
    NAMEDTUPLE    name, then tree, ...
    ENUM          name, name of the member; or the number of a combination of flags
    PYTREE        name, tree of the static part, tree, ...
    EXCEPTION     tree of its description
    REGISTERED    code given to `Codec.register`, tree
    PICKLE        bytes tree; only with allow_pickle=True
"""

import re
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np

from jdist._errors import type_error
from jdist.rpc.base.errors import ProtocolError

Tree = None | bool | int | float | str | bytes | list["Tree"]

(
    LEAF,
    TUPLE,
    LIST,
    SET,
    FROZENSET,
    DICT,
    ORDERED_DICT,
    DEFAULT_DICT,
    BIG_INT,
    COMPLEX,
    RANGE,
    SLICE,
    ELLIPSIS,
    BYTES,
    TEXT,
    BYTE_ARRAY,
    SCALAR,
    DTYPE,
    DTYPE_CLASS,
    KEY,
    REFERENCE,
    METHOD,
    PARTIAL,
    DATACLASS,
    NAMEDTUPLE,
    ENUM,
    PYTREE,
    EXCEPTION,
    REGISTERED,
    PICKLE,
) = range(30)


def names_code(tree: object) -> bool:
    """Whether decoding a tree may import a module or run code of a class.

    Types given to `Codec.register` decode themselves, without waiting.

    Example:
      >>> names_code([TUPLE, 1, [LEAF, 0]])
      False
      >>> names_code([TUPLE, [ENUM, "module:Colour", "RED"]])
      True
    """
    if not isinstance(tree, list) or not tree:
        return False
    code = tree[0]
    if code == LEAF:  # as most answers are
        return False
    if not isinstance(code, int) or (code >= REFERENCE and code != REGISTERED):
        return True
    return any(map(names_code, tree))


# --- names of dtypes ---

_PLAIN = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_SMALL = (  # bfloat16, the float8 kinds, int4 and so on.
    kind
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
)
_NATIVE = {name: np.dtype(name) for name in _PLAIN}
_NATIVE |= {np.dtype(kind).name: np.dtype(kind) for kind in _SMALL}
_NATIVE["float0"] = np.dtype(jax.dtypes.float0)
DTYPE_NAMES = {dtype: name for name, dtype in _NATIVE.items()}
"""Names of the frequent dtypes; `dtype_name` knows the others."""

# In NumPy's own notation: the other byte order, dates, texts of fixed length. Not
# `longdouble`, which is another format on another machine.
_OTHER = re.compile(
    r">[iu][248]|>f[248]|>c(8|16)|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,7}\])?"
    r"|[<>]U\d{1,9}|\|S\d{1,9}"
)


def dtype_name(dtype: np.dtype) -> str:
    """Return the name under which a dtype travels.

    Raises:
      TypeError: Arrays of this dtype cannot travel: Python objects, records.

    Example:
      >>> dtype_name(np.dtype("float32")), dtype_name(np.dtype(">i4"))
      ('float32', '>i4')
    """
    name = DTYPE_NAMES.get(dtype)
    if name is not None:
        return name
    if _OTHER.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        return dtype.str
    rule = "must be numbers, booleans, dates or texts of fixed length"
    remedy = "Send the fields of a record as arrays of their own."
    raise type_error("rpc(array.dtype)", rule, str(dtype), remedy)


def dtype_named(name: str) -> np.dtype:
    """Return the dtype of a name.

    Raises:
      ProtocolError: No dtype has this name.
    """
    dtype = _NATIVE.get(name)
    if dtype is not None:
        return dtype
    if _OTHER.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"No dtype has the name {name!r}: {error}") from error
    raise ProtocolError(f"No dtype has the name {name[:40]!r}.")


def unpacked(value: object, kind: Any, rule: str) -> Any:
    """A part of a message that another worker has sent, as a type.

    Args:
      value: What was sent. Where a type is of another class, its own instances pass.
      kind: The type, as `msgspec.convert` takes it.
      rule: What the message must have, as a sentence without its full stop.

    Raises:
      ProtocolError: It is not of that type.
    """
    try:
        return msgspec.convert(value, kind)
    # An array that stands for a mapping raises an error of its own.
    except Exception as error:
        raise ProtocolError(f"{rule}: {error}.") from error
