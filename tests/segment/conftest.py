"""Products in full precision: a GPU would else round float32 factors to 11 bits."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield
