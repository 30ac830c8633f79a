"""Explanations of wrong leaves, in words.

- `diagnosis`: common mistakes, recognized by the leaf's values.
- `uses`: which uses of a parameter its gradient leaves out, or counts twice.
"""

from jdist.verify.explanations.diagnosis import diagnose, likeness, nearest_factor
from jdist.verify.explanations.uses import uses_counted

__all__ = ["diagnose", "likeness", "nearest_factor", "uses_counted"]
