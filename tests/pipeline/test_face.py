"""The face of `jdist.pipeline`: what completion shows, and nothing else."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import types

from jdist import pipeline


def test_dir_shows_what_users_may_touch():
    """Rooms are attributes once they are imported, but are not shown."""
    assert dir(pipeline) == sorted(pipeline.__all__)
    assert "run" in vars(pipeline)
    assert not any(
        isinstance(getattr(pipeline, name), types.ModuleType) for name in dir(pipeline)
    )


def test_no_function_has_the_name_of_a_module_beside_it():
    """`import jdist.pipeline.simulation as s` always gives the module."""
    packages = [
        importlib.import_module(name)
        for _, name, is_package in pkgutil.walk_packages(
            pipeline.__path__, "jdist.pipeline."
        )
        if is_package
    ]
    assert len(packages) > 6
    for package in [pipeline, *packages]:
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert modules, package
        assert not modules & set(package.__all__), package
        assert all(
            inspect.ismodule(getattr(package, name))
            for name in modules & vars(package).keys()
        )


def test_every_public_name_is_documented():
    for name in pipeline.__all__:
        documented = inspect.getdoc(getattr(pipeline, name))
        assert documented, name


SCHEDULES = """
import sys
# The face of the part loads executors, and so JAX; the rooms alone must not.
part = type(sys)("jdist.pipeline")
part.__path__ = [__import__("jdist").__path__[0] + "/pipeline"]
sys.modules["jdist.pipeline"] = part
from jdist.pipeline.schedules.pipedream import pipedream
from jdist.pipeline.simulation.simulator import simulate
from jdist.pipeline.plan.partitioner import partition
from jdist.pipeline.plan.profile import Layer, Profile
layers = [Layer(name, "", 1.0, 2.0, (8.0,), 4.0) for name in "abc"]
plan = partition(Profile.chain(layers), 3, 1e9)
print(simulate(plan.schedule(6), plan.costs()).makespan)
print(sorted({"jax", "jdist.rpc", "jdist.segment"} & set(sys.modules)))
"""


def test_schedules_simulator_and_planner_need_no_jax():
    """They run where JAX is not imported at all."""
    done = subprocess.run(
        [sys.executable, "-c", SCHEDULES], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["24.0", "[]"]
