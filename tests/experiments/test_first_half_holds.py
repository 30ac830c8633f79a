"""The quick forms of the first half of the experiments hold, in fresh processes."""

import pytest

from tests.experiments.halves import check_end, check_quick_form, names, numbers

# Whichever test comes first runs the process, so that no line in slow.txt tells.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", numbers(0))
def test_the_command_ends_well(tmp_path_factory, number):
    check_end(tmp_path_factory, number)


@pytest.mark.parametrize("name", names(0))
def test_the_quick_form_holds(tmp_path_factory, name):
    check_quick_form(tmp_path_factory, name)
