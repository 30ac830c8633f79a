"""`accelerators --here` on CPU devices, before it runs on others."""

import json

import pytest

from experiments import __main__ as command

pytestmark = pytest.mark.optimized


def test_it_runs_on_the_devices_of_this_machine(tmp_path, monkeypatch):
    """Equality is judged, speed is measured and not judged; one file has it all."""
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    arguments = ["accelerators", "--here", "--quick", "--devices", "2"]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "accelerators.json").read_text())
    verdicts = {claim["text"]: claim["verdict"] for claim in record["claims"]}
    judged = [text for text, verdict in verdicts.items() if verdict == "holds"]
    assert len(judged) == 7
    assert all("bits" in text or "gradient" in text for text in judged)
    left = [text for text, verdict in verdicts.items() if verdict == "not judged"]
    assert len(left) == 4
    assert record["settings"]["here"]
    assert {*record["data"]["share_of_copy"]} == {"sgd", "adam"}
    assert {*record["data"]["step_seconds"]["pipeline"]} == {"1", "2"}
