"""PipeDream's profile format: read, written, refused; and where a model can be cut."""

from dataclasses import replace

import pytest

from jdist.pipeline import Layer, Profile, load_profile, partition
from jdist.pipeline.plan.cuts import cuts_of
from tests.pipeline.plans import PROFILES, random_profile

NAMES = ["vgg16", "resnet50", "gnmt"]
LINE = (
    "a -- Linear(3, 4) -- forward_compute_time=1.500, backward_compute_time=2.250, "
    "activation_size=12.0, parameter_size=8.000"
)


@pytest.mark.parametrize("name", NAMES)
def test_published_profiles_come_back_unchanged(name, tmp_path):
    """What is read from them is written as it was, but for digits after the point."""
    path = PROFILES / f"{name}.txt"
    profile = load_profile(path)
    profile.write(tmp_path / "again.txt")
    assert load_profile(tmp_path / "again.txt") == profile
    lines = (tmp_path / "again.txt").read_text().splitlines()
    assert len(lines) == len(path.read_text().splitlines())


def test_a_line(tmp_path):
    """Milliseconds become seconds; lists of outputs are understood, stages left out."""
    text = f"{LINE} -- stage_id=3\n{LINE.replace('a --', 'b --', 1)}\n\ta -- b\n"
    text = text.replace("activation_size=12.0", "activation_size=[12.0; 4.0]", 1)
    path = tmp_path / "profile.txt"
    path.write_text(text)
    profile = load_profile(path)
    first = Layer("a", "Linear(3, 4)", 1.5e-3, 2.25e-3, (12.0, 4.0), 8.0)
    assert profile["a"] == first
    assert (profile["a"].output_bytes, profile["a"].seconds) == (16, 3.75e-3)
    assert profile["b"] == replace(first, name="b", activation_bytes=(12.0,))
    assert profile.edges == (("a", "b"),)
    assert profile.to_text() == text.replace(" -- stage_id=3", "")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a -- Linear(3, 4)\n", "a layer or an edge in line 1"),
        (f"{LINE}\na -- b\n", "a layer or an edge in line 2"),
        (f"\n{LINE.replace('1.500', 'fast')}\n", "numbers in line 2.*fast"),
        (f"{LINE}\n{LINE}\n", r"different names.*'a'"),
        (f"{LINE}\n\ta -- b\n", r"join two of its layers.*'b'"),
        (f"{LINE}\n\ta -- a\n", "not lead in a circle. Got a -> a"),
        (LINE.replace("12.0", "-12.0"), "costs of at least 0"),
        (LINE.replace("1.500", "nan"), "costs of at least 0"),
        (LINE.replace("2.250", "inf"), "finite costs of at least 0"),
        (LINE.replace("12.0", "[12.0; inf]"), "finite costs of at least 0"),
        (LINE.replace("8.000", "inf"), "finite costs of at least 0"),
    ],
)
def test_files_that_are_refused(text, match, tmp_path):
    path = tmp_path / "profile.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        load_profile(path)


def test_names_have_no_blanks():
    with pytest.raises(ValueError, match=r"without blanks.*'a b'"):
        Profile((layer("a b"),), ())


def test_layers_come_after_what_feeds_them(rng):
    profile = random_profile(rng, layers=9, chain=False)
    assert sorted(profile.order) == sorted(layer.name for layer in profile.layers)
    for source, target in profile.edges:
        assert profile.order.index(source) < profile.order.index(target)


# --- cuts ---


@pytest.mark.parametrize(("name", "states"), [("vgg16", 40), ("resnet50", 240)])
def test_as_many_cuts_as_the_published_planner_sees(name, states):
    """And the empty one."""
    assert len(cuts_of(load_profile(PROFILES / f"{name}.txt"))) == states + 1


def layer(name, seconds=1.0, size=1.0, parameters=1.0, description=""):
    return Layer(name, description, seconds, 0.0, (size,), parameters)


def diamond(extra=()):
    """a feeds b and c, both feed d."""
    layers = [layer(n, 2.0**i, 10.0**i, i) for i, n in enumerate("abcd")]
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), *extra]
    return Profile(tuple(layers), tuple(edges))


def test_the_cuts_of_a_diamond():
    """None, a, ab, ac, abc, abcd; their totals, and what crosses each."""
    cuts = cuts_of(diamond())
    order = cuts.names
    found = {
        "".join(sorted(cuts.between(0, i))): (
            cuts.seconds[i],
            cuts.activation_bytes[i],
            cuts.parameter_bytes[i],
            cuts.output_bytes[i],
        )
        for i in range(len(cuts))
    }
    assert order[0] == "a"
    assert found == {
        "": (0, 0, 0, 0),
        "a": (1, 1, 0, 1),
        "ab": (3, 11, 1, 11),
        "ac": (5, 101, 2, 101),
        "abc": (7, 111, 3, 111),
        "abcd": (15, 1111, 6, 1000),
    }
    names = ["".join(sorted(cuts.between(0, i))) for i in range(len(cuts))]
    for i, small in enumerate(names):
        for j, large in enumerate(names):
            assert cuts.within[i, j] == (set(small) < set(large))
    assert set(cuts.between(names.index("ab"), names.index("abcd"))) == {"c", "d"}


def test_inputs_and_unused_outputs_are_no_layers():
    layers = [
        layer("x", description="Input0"),
        layer("y", description="Input1"),
        layer("a"),
        layer("b"),
        layer("unused", description="__getitem__(1)"),
        layer("used", description="__getitem__(0)"),
    ]
    edges = [("x", "a"), ("y", "b"), ("a", "unused"), ("a", "used"), ("used", "b")]
    profile = Profile(tuple(layers), tuple(edges))
    assert cuts_of(profile).names == ("a", "used", "b")
    plan = partition(profile, 3, 1e9)
    assert [stage.layers for stage in plan.stages] == [("a",), ("used",), ("b",)]


def test_a_second_source_comes_with_what_needs_it():
    """An encoder of two layers, a decoder's embedding, and where they meet."""
    layers = tuple(layer(n) for n in ("encode", "encode2", "embed", "decode"))
    edges = (("encode", "encode2"), ("encode2", "decode"), ("embed", "decode"))
    cuts = cuts_of(Profile(layers, edges))
    found = [set(cuts.between(0, i)) for i in range(len(cuts))]
    encoder = {"encode", "encode2"}
    assert found == [set(), {"encode"}, encoder, encoder | {"embed", "decode"}]


def test_nothing_to_plan():
    profile = Profile((layer("x", description="Input"),), ())
    with pytest.raises(ValueError, match="a layer that is no input"):
        cuts_of(profile)


def test_too_wide_a_graph_is_refused():
    """13 branches of two layers can be cut in 3^13 ways."""
    layers, edges = [layer("in")], []
    for i in range(13):
        layers += [layer(f"{i}a"), layer(f"{i}b")]
        edges += [("in", f"{i}a"), (f"{i}a", f"{i}b")]
    with pytest.raises(ValueError, match=r"at most 4000 ways.*widest part"):
        cuts_of(Profile(tuple(layers), tuple(edges)))
