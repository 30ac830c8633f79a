"""Explanations of wrong leaves, in words.

- `diagnosis`: common mistakes, recognized by the leaf's values.
- `uses`: which uses of a parameter its gradient leaves out, or counts twice.
"""

__all__: list[str] = []
