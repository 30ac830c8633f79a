"""The claims of the parameter server can fail, and its mean is one."""

import numpy as np
import pytest

from experiments import parameter_server as job


def found(rounds=4):
    """As a run that holds would be."""
    server = [
        job.Round(("a", "b", f"c{i}"), f"mean {i}", f"params {i}")
        for i in range(rounds)
    ]
    trainers = [
        [job.Round((one.sent[i],), one.applied, one.params) for one in server]
        for i in range(job.TRAINERS)
    ]
    last = server[-1].params
    return job.Trained(server, trainers, [2.0, 1.0, 0.5, 0.1], (0.1, 0.9), last, 0.5)


def failing(trained):
    return [claim.text for claim in job.claims(trained, 4) if not claim.holds]


def test_claims_that_hold():
    assert failing(found()) == []


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("sent", ("x",), "each trainer's gradient is what the server received"),
        ("applied", "x", "trainers are told the gradient that the server applied"),
        ("params", "x", "all go on with the same parameters"),
    ],
)
def test_one_round_of_one_trainer_is_seen(field, value, text):
    trained = found()
    trained.trainers[1][2] = trained.trainers[1][2]._replace(**{field: value})
    assert [told.startswith(text) for told in failing(trained)] == [True]


def test_what_else_must_hold():
    for change, text in (
        ({"alone": "x"}, "after the last round"),
        ({"error_over_bound": 1.5}, "the mean is the gradient"),
        ({"losses": [2.0, 2.0, 2.0, 1.9]}, "the loss falls"),
        ({"accuracy": (0.5, 0.6)}, "accuracy rises"),
        ({"server": found().server[:3]}, "the server steps once"),
    ):
        if "server" in change:
            change["trainers"] = [each[:3] for each in found().trainers]
            change["alone"] = "params 2"
        told = failing(found()._replace(**change))
        assert told[0].startswith(text), (change, told)


def test_the_mean_is_added_up_in_the_order_of_the_trainers():
    big, small = np.float32(1e8), np.float32(1.0)
    one = job.average([{"w": big}, {"w": small}, {"w": -big}])
    other = job.average([{"w": big}, {"w": -big}, {"w": small}])
    assert one["w"] == 0
    assert other["w"] == np.float32(1) / 3
