"""Which compilers for absent hardware are installed here."""

import importlib.metadata

import pytest

COMPILERS = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}


def needs(platform):
    """Marks of a test that needs the compiler of a platform; skipped without it."""
    package = COMPILERS[platform]
    is_here = any(importlib.metadata.distributions(name=package))
    reason = f"{package} is not installed"
    return [pytest.mark.compilers, pytest.mark.skipif(not is_here, reason=reason)]
