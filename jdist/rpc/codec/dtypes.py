"""Dtypes by name, as arrays and scalars carry them over the wire."""

import re

import jax
import ml_dtypes
import numpy as np

from jdist._errors import requirement
from jdist.rpc.base.errors import ProtocolError

__all__ = ["dtype_name", "dtype_named"]


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
_NAMES = {dtype: name for name, dtype in _NATIVE.items()}

# In NumPy's own notation: the other byte order, dates, texts of fixed length. Not
# `longdouble`, which is another format on another machine.
_OTHER = re.compile(
    r">[iu][248]|>f[248]|>c(8|16)|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,7}\])?"
    r"|[<>]U\d{1,9}|\|S\d{1,9}"
)


def dtype_name(dtype: np.dtype) -> str:
    """The name under which a dtype travels.

    Raises:
      TypeError: Arrays of this dtype cannot travel: Python objects, records.

    Example:
      >>> dtype_name(np.dtype("float32")), dtype_name(np.dtype(">i4"))
      ('float32', '>i4')
    """
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    if _OTHER.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        return dtype.str
    rule = "must be numbers, booleans, dates or texts of fixed length"
    remedy = "Send the fields of a record as arrays of their own."
    raise TypeError(requirement("rpc(array.dtype)", rule, str(dtype), remedy))


def dtype_named(name: str) -> np.dtype:
    """The dtype of this name.

    Raises:
      ProtocolError: There is none.
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
