"""Covering arrays of strength two: the cases of tests that cross three axes or more."""

import itertools


def pairs(**axes):
    """Cases in which any two values of any two axes occur together.

    Greedy and deterministic: the next case is the first one of the full product that
    has the most pairs which no case before it has.

    Args:
      **axes: The values of each axis.

    Returns:
      A list of tuples, one value of each axis in the order given. Of three axes:

      >>> axes = {"a": "wxyz", "b": "pqrs", "c": (5, 7, 11)}
      >>> cases = pairs(**axes)
      >>> len(cases), len(list(itertools.product(*axes.values())))
      (16, 48)
      >>> both = itertools.combinations(range(3), 2)
      >>> all(
      ...     {(case[m], case[n]) for case in cases}
      ...     == set(itertools.product([*axes.values()][m], [*axes.values()][n]))
      ...     for m, n in both
      ... )
      True
    """
    values = [list(each) for each in axes.values()]
    product = list(itertools.product(*(range(len(each)) for each in values)))
    missing = set().union(*map(_pairs_of, product))
    cases = []
    while missing:
        case = max(product, key=lambda case: len(missing & _pairs_of(case)))
        missing -= _pairs_of(case)
        cases.append(tuple(values[axis][n] for axis, n in enumerate(case)))
    return cases


def _pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))
