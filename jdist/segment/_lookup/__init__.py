"""Lookup of compiled functions by a function's contents or by its traced program.

- `bytecode`: the variables and attributes that a function's code can read.
- `contents`: a function's code, and all that it refers to, as a key.
- `program_key`: a traced program as a key.
- `traced`: the traced programs of one version of a function.
- `cache`: bounded maps from contents and programs to compiled functions.
"""

__all__: list[str] = []
