"""JAX as a newcomer has it."""

import contextlib

import jax

WANTED = {
    "jax_numpy_rank_promotion": "allow",
    "jax_numpy_dtype_promotion": "standard",
}


@contextlib.contextmanager
def own_promotions():
    """JAX's own promotions, in all threads; the suite's are stricter."""
    before = {name: getattr(jax.config, name) for name in WANTED}
    for name, value in WANTED.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
