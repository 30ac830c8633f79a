"""What `jdist.ray.cluster` refuses before it asks Ray for anything."""

import sys

import jax
import pytest

import jdist.ray
from jdist import Unavailable, rpc


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        ([], {}, r"cluster\(names\)` must be one or more unique names, .* Got \[\]"),
        (["a", "a"], {}, r"none of them 'driver'. Got \['a', 'a'\]"),
        (["driver"], {}, r"none of them 'driver'. Got \['driver'\]"),
        (["a"], {"resources": {}}, r"must have a positive amount of one .* Got \{\}"),
        (["a"], {"resources": {"GPU": 0}}, r"positive amount .* Got \{'GPU': 0\}"),
        (["a"], {"strategy": "NEAR"}, r"must be one of 'PACK', .* Got 'NEAR'"),
        (
            ["a"],
            {"options": rpc.RpcOptions(host="10.0.0.1")},
            r"must have no host, which belongs to one worker. Got 10.0.0.1",
        ),
        (
            ["a"],
            {"options": rpc.RpcOptions(device=jax.devices()[0])},
            "must have no device, which belongs to one worker. Got ",
        ),
        (
            ["a"],
            {"options": rpc.RpcOptions(key=b"k" * 32)},
            "must have a key that is text: .* Got bytes",
        ),
    ],
)
def test_wrong_arguments(names, given, message):
    with pytest.raises(ValueError, match=message), jdist.ray.cluster(names, **given):
        pytest.fail("refused")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": "ab"}, r"cluster\(names\)` must be one or more unique .* Got 'ab'"),
        ({"names": 2}, r"cluster\(names\)` must be one or more unique .* Got 2"),
        ({"names": [1]}, r"cluster\(names\)` must be one or more unique .* Got \[1\]"),
        ({"resources": 4}, r"resources=...\)` must be a mapping from Ray's .* Got 4"),
        ({"resources": {"CPU": "4"}}, r"resources={'CPU': ...}\)` must be .* Got '4'"),
        ({"options": {"timeout": 5}}, r"options=...\)` must be an RpcOptions. Got {"),
        ({"replace": "False"}, r"replace=...\)` must be True or False. Got 'False'"),
        ({"joined": "begin"}, r"joined=...\)` must be a function. Got 'begin'"),
        (
            {"timeout": None},
            r"timeout=...\)` must be a positive number of seconds.* Got None",
        ),
    ],
)
def test_wrong_types(given, message):
    made = jdist.ray.cluster(**{"names": ["a"]} | given)
    with pytest.raises(TypeError, match=message), made:
        pytest.fail("refused")


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    text = r"`jdist.ray.cluster` needs Ray: pip install .*\[ray\]"
    with pytest.raises(Unavailable, match=text), jdist.ray.cluster(["a"]):
        pytest.fail("Ray is not there")
