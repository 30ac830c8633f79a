"""A function is looked up while another thread imports its package."""

import importlib
import sys
import threading
import types

from jdist.rpc.codec.functions import FunctionTable
from tests.rpc.hosts import PATIENCE
from tests.rpc.rref.common import wait_for

PACKAGE = """
import gate_of_this_test as gate
gate.entered.set()
assert gate.go_on.wait(60)
from package_of_this_test.part import function
"""
PART = """
import package_of_this_test

def function():
    return 3
"""


def is_importing(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def test_neither_gets_half_a_module(tmp_path, monkeypatch):
    folder = tmp_path / "package_of_this_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "part.py").write_text(PART)
    monkeypatch.syspath_prepend(tmp_path)
    gate = types.SimpleNamespace(entered=threading.Event(), go_on=threading.Event())
    monkeypatch.setitem(sys.modules, "gate_of_this_test", gate)
    found, errors = [], []

    def run(what):
        try:
            found.append(what())
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    def importing():
        return importlib.import_module("package_of_this_test").function

    def looking_up():
        table = FunctionTable(["package_of_this_test"])
        return table.resolve("package_of_this_test.part:function")

    first, second = (
        threading.Thread(target=run, args=(what,)) for what in (importing, looking_up)
    )
    first.start()
    assert gate.entered.wait(PATIENCE)
    second.start()
    assert wait_for(lambda: is_importing(second))
    gate.go_on.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert errors == []
    assert found[0] is found[1]
    for name in ("package_of_this_test", "package_of_this_test.part"):
        monkeypatch.delitem(sys.modules, name)
