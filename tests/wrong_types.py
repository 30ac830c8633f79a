"""Values of wrong types, given to one argument after another."""

import pytest


def refused(call, values, named):
    """Each value is refused in words that name the function, the argument and it."""
    for value in values:
        with pytest.raises(TypeError, match=r"^`.*` must .*Got ") as caught:
            call(value)
        assert named in str(caught.value), (value, caught.value)
