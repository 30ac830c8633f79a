"""Derivative rules that tell with which cotangent a backward pass began."""

import jax


def rule(change):
    """The identity, whose cotangent goes through `change`."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return identity
