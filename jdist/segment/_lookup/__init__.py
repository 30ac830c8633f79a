"""Compiled functions found again: by what a function refers to, or by its program.

- `bytecode`: what a function's code can read.
- `contents`: what a function is made of, as a key.
- `program_key`: a traced program as a key.
- `traced`: a function by its programs, of one version of what it reads.
- `cache`: what is compiled, by contents and by program.
"""

__all__: list[str] = []
