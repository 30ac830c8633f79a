"""The first element of every list in a tree: what the rest of the list means.

A tree is None, bool, int (64 bit), float, str, bytes, or a list `[code, ...]`:

    LEAF        index                      an array of the frame
    TUPLE       item...                    LIST, SET, FROZENSET likewise
    DICT        key, value, ...            ORDERED_DICT likewise
    DEFAULT_DICT  factory, key, value, ...
    BIG_INT     bytes                      little-endian, signed
    COMPLEX     real, imag
    RANGE       start, stop, step          SLICE likewise
    ELLIPSIS
    BYTES       index                      long bytes: a leaf of uint8
    TEXT        index                      long or unusual text: a leaf of UTF-8
    BYTE_ARRAY  bytes tree
    SCALAR      dtype, bytes               a NumPy scalar
    DTYPE       dtype                      DTYPE_CLASS: its scalar type
    KEY         implementation, tree       a PRNG key array
    REFERENCE   "module:qualname"          a function or class
    METHOD      owner, name                a bound method
    PARTIAL     function, args, kwargs     a functools.partial
    DATACLASS   "module:qualname", field, value, ...
    NAMEDTUPLE  "module:qualname", item...
    ENUM        "module:qualname", name    FLAG: its number
    PYTREE      "module:qualname", static part, child...
    EXCEPTION   description
    REGISTERED  code, value                a type given to `Codec.register`
    PICKLE      bytes tree                 only with allow_pickle=True
"""

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
    FLAG,
    PYTREE,
    EXCEPTION,
    REGISTERED,
    PICKLE,
) = range(31)
