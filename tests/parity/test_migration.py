"""The migration guide: torch's blocks and ours, as printed, give the same numbers."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n# (both|torch|torch, worker0|jdist)\n(.*?)```", re.S)
SETS = re.compile(r"^ *(\w+, )*found\b.* = ", re.M)
PAGES = {
    path.stem: BLOCK.findall(path.read_text())
    for path in sorted((ROOT / "docs" / "migration").glob("*.md"))
    if path.stem != "index"
}
PAIRS = {
    "autograd": 5, "data_parallel": 9, "not_here": 2, "optimizers": 8,
    "pipelining": 5, "rpc": 4,
}  # fmt: skip


def sets(block):
    """Whether its `found` is to be compared."""
    return SETS.search(block[1]) is not None


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """What torch has found, by page."""
    folder = tmp_path_factory.mktemp("torch")
    blocks = {
        name: [(*block, sets(block)) for block in page if block[0] != "jdist"]
        for name, page in PAGES.items()
    }
    (folder / "blocks.json").write_text(json.dumps(blocks))
    module = "tests.parity.migration_in_torch"
    subprocess.run(
        [sys.executable, "-m", module, str(folder)], check=True, cwd=ROOT, timeout=240
    )
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_both_columns_find_the_same(name, torchs, monkeypatch, tmp_path):
    """In float64, where rounding in another order is far below 1e-9."""
    page = [block for block in PAGES[name] if not block[0].startswith("torch")]
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "main.py")
    Path(main.__file__).write_text("\n".join(code for _, code in page))
    monkeypatch.setitem(sys.modules, "__main__", main)
    ours = []
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        for heading, code in page:
            exec(compile(code, name, "exec"), vars(main))
            if sets((heading, code)):
                ours.append(main.found)
    assert len(ours) == len(torchs[name]) == PAIRS[name]
    for mine, theirs in zip(ours, torchs[name], strict=True):
        compare(mine, theirs)


def compare(mine, theirs):
    """Lists by their parts, in order."""
    if isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            compare(one, other)
    else:
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)
