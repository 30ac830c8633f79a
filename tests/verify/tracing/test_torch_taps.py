"""What `verify.shown` refuses; tests/parity has its tests beside torch."""

import pytest

from jdist import verify


class Module:
    """As far as torch's modules are looked at before a forward pass."""

    def named_modules(self):
        return [("", self), ("blocks.0", self)]

    def register_forward_hook(self, hook):
        raise AssertionError("nothing is hooked before the names are checked")


def entered(*arguments):
    with verify.shown(*arguments):
        pass


def test_what_is_no_torch_module_is_refused():
    with pytest.raises(TypeError, match=r"shown\(module\)` must be a torch.nn.Module"):
        entered(lambda x: x)


def test_names_must_map_taps_to_submodules():
    with pytest.raises(TypeError, match=r"shown\(names=...\)` must be a mapping from"):
        entered(Module(), ["blocks.0"])
    with pytest.raises(TypeError, match=r"names=\{.block.: ...\}\)` must be a path"):
        entered(Module(), {"block": 3})
    with pytest.raises(ValueError, match=r"must name submodules. Got 'blocks/0'"):
        entered(Module(), {"block": "blocks/0"})
