"""Compiled functions found again: the same function, or the same program.

- `bytecode`: the variables and attributes that a function's code can read.
- `guards`, `contents`: all that a function reads, and whether it was replaced since.
- `program_key`: a traced program as a key.
- `traced`: the traced programs of one version of a function.
- `cache`: bounded maps from functions and programs to what is compiled of them.
- `guarded_jit`: `jax.jit` with present values.
"""

__all__: list[str] = []
