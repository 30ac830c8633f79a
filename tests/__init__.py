"""The tests; they mirror the library's files."""

import os

if os.environ.get("JDIST_CHAOS"):  # also in the processes that tests start
    from tests import chaos as chaos
