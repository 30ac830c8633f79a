"""Optimizers by torch's names."""

import jax.numpy as jnp
import pytest

from jdist import optim
from tests.optim.cases import ALGORITHMS


def test_every_optimizer_is_found_by_torchs_name():
    assert {a.torch_name for a in ALGORITHMS} <= set(optim.functional_optim_map)
    for algorithm in ALGORITHMS:
        found = optim.functional_optim_map[algorithm.torch_name]
        assert found is getattr(optim, algorithm.name)
        assert found().name == algorithm.name


def test_a_name_can_be_registered_once():
    def mine(*, lr=0.5):
        return optim.sgd(lr=lr)

    optim.register_functional_optim("Mine of this test", mine)
    optim.register_functional_optim("Mine of this test", mine)
    opt = optim.functional_optim_map["Mine of this test"](lr=1.0)
    params = jnp.array([2.0])
    assert opt.step(params, params, opt.init(params))[0] == 0
    with pytest.raises(ValueError, match=r"name=...\)` must be .* free. Got SGD."):
        optim.register_functional_optim("SGD", mine)
    assert optim.functional_optim_map["SGD"] is optim.sgd


def test_the_map_itself_is_read_only():
    with pytest.raises(TypeError, match="does not support item assignment"):
        optim.functional_optim_map["SGD"] = optim.adam
