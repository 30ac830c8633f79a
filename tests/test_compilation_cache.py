"""Compiled programs in files: the same bits, only what is safe, a bounded folder."""

import os
import stat
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.compilation_cache import compilation_cache

from jdist import _compilation_cache

SEEN = {"cache_hits": 0, "cache_misses": 0}


def _listen(event, **_):
    name = event.rpartition("/")[2]
    if name in SEEN:
        SEEN[name] += 1


jax.monitoring.register_event_listener(_listen)


@pytest.fixture
def folder(tmp_path):
    """An empty folder, which this process uses for the length of a test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def counted(run):
    """What `run` returns, and how many programs it found and how many it added."""
    before = dict(SEEN)
    result = jax.block_until_ready(run())
    return result, *(SEEN[name] - before[name] for name in SEEN)


def over_devices(mesh, x):
    spec = jax.sharding.PartitionSpec("data")

    def body(x):
        return jax.lax.psum(jnp.sin(x) @ x.T, "data")

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    return jax.jit(mapped)(x)


def network(w, x):
    def layer(h, w):
        return jnp.tanh(h @ w), jnp.sum(h)

    h, sums = jax.lax.scan(layer, x, w)
    return jnp.sum(h**3) + jnp.sum(sums)


def gradient(w, x):
    return jax.grad(network)(w, x)


def drawn(x):
    return jax.random.normal(jax.random.key(3), x.shape, x.dtype) * x


# Each makes a new function, which JAX has not compiled in this process.
PROGRAMS = {
    "gradient": lambda mesh, x: jax.jit(lambda x: gradient(x[:2, :6, :6], x[2, :, :6]))(
        jnp.stack([x, x[::-1], x + 1])
    ),
    "lapack": lambda mesh, x: jax.jit(lambda x: jnp.linalg.svd(x))(x),
    "sort": lambda mesh, x: jax.jit(lambda x: jnp.argsort(x.ravel()))(x),
    "random": lambda mesh, x: jax.jit(lambda x: drawn(x))(x),
    "bfloat16": lambda mesh, x: jax.jit(lambda x: x @ x.T)(x.astype(jnp.bfloat16)),
    "collective": over_devices,
}


def bits_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_read_has_the_bits_of_what_was_compiled(folder, rng, mesh, name):
    x = jnp.asarray(rng.normal(size=(8, 7)))
    run = partial(PROGRAMS[name], mesh(2), x)
    compiled, _, added = counted(run)
    assert added >= 1
    loaded, found, compiled_again = counted(run)
    assert found >= 1
    assert compiled_again == 0
    assert bits_of(loaded) == bits_of(compiled)
    assert any(np.asarray(y).any() for y in jax.tree.leaves(compiled))


def test_a_constant_another_dtype_or_another_flag_is_another_program(folder):
    """Nothing that a result depends on is left out of what programs are found by."""
    x = np.arange(5.0)
    makers = [
        lambda: jax.jit(lambda x: x * 2.5)(x),
        lambda: jax.jit(lambda x: x * 2.5000001)(x),
        lambda: jax.jit(lambda x: x * 2.5)(x.astype(np.float32)),
        lambda: jax.jit(lambda x: x * 2.5)(x[:4]),
        lambda: jax.jit(
            lambda x: x * 2.5, compiler_options={"xla_cpu_enable_fast_math": True}
        )(x),
    ]
    for make in makers:
        _, found, added = counted(make)
        assert (found, added) == (0, 1)


def test_a_program_that_calls_python_calls_its_own_function(folder):
    """All are one text. JAX keeps such programs from 0.12 on."""
    heard, names = [], ["one", "three", "one", "eleven"]

    def calling(name):
        said = jax.ShapeDtypeStruct((), np.float64)

        def answer(x):
            heard.append(name)
            return np.float64(len(name)) * x

        return jax.jit(lambda x: io_callback(answer, said, x))(3.0)

    with jax.numpy_dtype_promotion("standard"):
        for name in names:
            jax.clear_caches()  # as in a new process, which finds what is kept
            assert float(calling(name)) == 3 * len(name)
    assert heard == names


def test_a_torn_file_is_compiled_again(folder):
    """A process may be killed while it writes."""

    def run():
        return jax.jit(lambda x: x * 7.25)(np.arange(3.0))

    counted(run)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        result, found, _ = counted(run)
    assert found == 0
    assert result.tolist() == [0, 7.25, 14.5]


def test_a_full_folder_loses_what_was_not_used_for_longest(tmp_path):
    """Only in the folder of this processor, and only as much as must go."""
    prepare = _compilation_cache.prepared.__wrapped__
    variables = prepare(tmp_path / "new")
    own = Path(variables[_compilation_cache.FOLDER])
    assert own.parent == tmp_path / "new"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    other = tmp_path / "new" / "another processor"
    other.mkdir()
    (other / "old").write_bytes(bytes(500))
    for number, length in enumerate((100, 20, 300, 40)):
        (own / f"{number}").write_bytes(bytes(length))
        os.utime(own / f"{number}", (10**9 - number, 10**9 - number))
    # Read lately, though written long ago.
    os.utime(own / "3", (10**9 + 5, 10**9 - 3))
    assert prepare(tmp_path / "new", 460) == variables
    assert len(list(own.iterdir())) == 4
    prepare(tmp_path / "new", 150)
    assert sorted(path.name for path in own.iterdir()) == ["0", "3"]
    prepare(tmp_path / "new", 39)
    assert list(own.iterdir()) == []
    assert list(other.iterdir())


def test_the_users_folder(monkeypatch):
    """XDG's, if it is absolute, or one in the home."""
    find = _compilation_cache.default_folder
    assert find({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/jdist")
    monkeypatch.setenv("HOME", "/users/one")
    for unusable in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert find(unusable) == Path("/users/one/.cache/jdist")


def test_a_command_switches_it_on(tmp_path, monkeypatch, folder):
    """In the user's folder, for itself and for its children; not over another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    _compilation_cache.switch_on()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    monkeypatch.setenv(_compilation_cache.FOLDER, "")
    monkeypatch.delenv(_compilation_cache.FOLDER)
    _compilation_cache.switch_on()
    own = Path(os.environ[_compilation_cache.FOLDER])
    assert own.parent == tmp_path / "home" / "jdist"
    assert jax.config.jax_compilation_cache_dir == str(own)
    monkeypatch.delenv(_compilation_cache.FOLDER)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="compiled programs are not kept: .*file"):
        _compilation_cache.switch_on()
    assert _compilation_cache.FOLDER not in os.environ


def test_the_suite_keeps_its_programs():
    """And children find them: JAX reads these variables when it is imported."""
    assert os.environ[_compilation_cache.FOLDER] == jax.config.jax_compilation_cache_dir
    assert float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]) == 0
