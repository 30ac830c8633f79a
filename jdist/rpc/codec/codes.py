"""The format of a tree: the codes that begin its lists.

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
    ENUM          name, name of the member
    FLAG          name, number: a combination of members
    PYTREE        name, tree of the static part, tree, ...
    EXCEPTION     tree of its description
    REGISTERED    code given to `Codec.register`, tree
    PICKLE        bytes tree; only with allow_pickle=True
"""

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
    FLAG,
    PYTREE,
    EXCEPTION,
    REGISTERED,
    PICKLE,
) = range(31)


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
