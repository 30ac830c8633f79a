"""The manifest that docs/clusters/kubernetes.md shows."""

import copy
import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from jdist.launch.options import parse

PAGE = Path(__file__).parents[3] / "docs/clusters/kubernetes.md"
SCHEMA = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
MANIFEST = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)[1])
JOB = MANIFEST["spec"]["replicatedJobs"][0]
POD = JOB["template"]["spec"]["template"]["spec"]["containers"][0]


def test_it_fits_jobsets_schema():
    jsonschema.validate(MANIFEST, SCHEMA)
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.failurePolicy.maxRestarts", "3", "'3' is not of type 'integer'"),
        (
            "spec.network.enableDnsHostnames",
            True,
            "'enableDnsHostnames' was unexpected",
        ),
        ("spec.replicatedJobs.0.name", None, "'name' is a required property"),
        ("spec.replicatedJobs.0.replicas", -1, "-1 is less than the minimum of 0"),
        (
            "spec.replicatedJobs.0.template.spec.template",
            None,
            "'template' is a requir",
        ),
        (
            "spec.replicatedJobs.0.template.spec.template.spec.containers.0.env.0.values",
            "x",
            "'values' was unexpected",
        ),
    ],
)
def test_a_manifest_with_a_mistake_does_not(path, value, message):
    broken = copy.deepcopy(MANIFEST)
    place, (*above, last) = broken, path.split(".")
    for name in above:
        place = place[int(name) if name.isdigit() else name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(jsonschema.ValidationError, match=re.escape(message)):
        jsonschema.validate(broken, SCHEMA)


def test_its_command_starts_as_many_workers_as_there_are_pods():
    (command,) = POD["args"]
    launch, *options = command.removeprefix("exec python -m ").split(" ", 1)
    assert launch == "jdist.launch"
    number = options[0].replace('"$JOB_COMPLETION_INDEX"', "0")
    told = parse(["--no-python", *shlex.split(number)])
    job = JOB["template"]["spec"]
    assert told.nnodes == job["completions"] == job["parallelism"]
    first = f"{MANIFEST['metadata']['name']}-{JOB['name']}-0-0"
    assert told.master_addr == f"{first}.{MANIFEST['metadata']['name']}"
