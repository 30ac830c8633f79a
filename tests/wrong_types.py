"""Values of wrong types, given to one argument after another."""

import numpy as np
import pytest


class Tensor:
    """An array of another framework: with a shape, and a dtype that NumPy lacks."""

    def __init__(self, *shape):
        self.shape = shape
        self.ndim = len(shape)
        self.dtype = "framework.float32"

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, np.float32)


FOREIGN = r"must be a pytree of arrays and numbers\. Got a tests.wrong_types.Tensor at "
"""What is said of it; the path follows."""


def refused(call, values, named):
    """Each value is refused in words that name the function, the argument and it."""
    for value in values:
        with pytest.raises(TypeError, match=r"^`.*` must .*Got ") as caught:
            call(value)
        assert named in str(caught.value), (value, caught.value)
