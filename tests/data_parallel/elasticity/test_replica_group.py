"""What a replica may send to rank 0."""

import pytest

from jdist.data_parallel.elasticity.replica_group import _unpacked
from jdist.rpc import ProtocolError

REPORT = (0, None, 3, ((0, 2), (4, 5)), None, 7)


def test_reports_and_goodbyes_are_read():
    for report, sums in ((REPORT, [[], []]), (None, [])):
        assert _unpacked(("run", {"steps": "3"}, 9.0, report, sums)).report == report


@pytest.mark.parametrize(
    "body",
    [
        None,
        (),
        ("run", {"steps": "3"}, 9.0, REPORT),
        (1, {"steps": "3"}, 9.0, REPORT, [[], []]),
        ("run", {"steps": 3}, 9.0, REPORT, [[], []]),
        ("run", {"steps": "3"}, "9", REPORT, [[], []]),
        ("run", {"steps": "3"}, 9.0, REPORT[:5], [[], []]),
        ("run", {"steps": "3"}, 9.0, (None, *REPORT[1:]), [[], []]),
        ("run", {"steps": "3"}, 9.0, (0, "1", *REPORT[2:]), [[], []]),
        ("run", {"steps": "3"}, 9.0, (*REPORT[:3], ((0,), (1, 2)), None, 7), [[], []]),
        ("run", {"steps": "3"}, 9.0, (*REPORT[:3], [0, 2], None, 7), [[], []]),
        ("run", {"steps": "3"}, 9.0, REPORT, [1.0, 2.0]),
        ("run", {"steps": "3"}, 9.0, REPORT, [[]]),
        ("run", {"steps": "3"}, 9.0, None, [[]]),
    ],
)
def test_anything_else_is_refused(body):
    """A request that waits for the leader would else wait for ever."""
    with pytest.raises(ProtocolError, match="A report of an elastic run has a name"):
        _unpacked(body)
