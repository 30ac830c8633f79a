"""A pytest plugin: the fixture `judge`, with which a test fails on a wrong gradient.

pytest imports this module in every session of an environment that has jdist. It
therefore imports neither JAX nor the judge before a test judges something.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from jdist._errors import VerificationError, check_choice, requirement

if TYPE_CHECKING:
    from jdist.verify import Report

DTYPES = ("bfloat16", "float16", "float32", "float64")
MARKER = "jdist(dtype=None): the dtype that `judge` judges in; overrides --jdist-dtype"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the fixture `judge`."""
    group = parser.getgroup("jdist", "the fixture `judge` of jdist")
    group.addoption(
        "--jdist-dtype",
        choices=DTYPES,
        help="dtype of the floating arrays it is given (default: their own)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", MARKER)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names a test by its layout, such as those of `verify.covering_array`."""
    if argname != "layout" or not isinstance(val, Mapping):
        return None
    return ",".join(f"{axis}={value}" for axis, value in val.items())


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> GradientJudge:
    """Judges trainers; a wrong gradient fails the test, which shows the report."""
    dtype = request.config.getoption("--jdist-dtype")
    # The marker of a test over those of its class and its module.
    for marker in reversed(list(request.node.iter_markers("jdist"))):
        if marker.args or marker.kwargs.keys() != {"dtype"}:
            rule = "takes dtype= and nothing else"
            got = [*marker.args, *marker.kwargs]
            raise TypeError(requirement("pytest.mark.jdist", rule, got))
        dtype = marker.kwargs["dtype"]
    check_choice("pytest.mark.jdist(dtype=...)", dtype, (None, *DTYPES))
    return GradientJudge(dtype)


@dataclass(frozen=True)
class GradientJudge:
    """What the fixture `judge` gives a test.

    Attributes:
      dtype: The dtype of the judgements; None for that of the arrays.
    """

    dtype: str | None = None

    def gradients(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        batch: Any,
        trainer: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        **options: Any,
    ) -> Report:
        """Judges a trainer by its loss and gradient, as `verify.gradients` does.

        Args:
          loss_fn: As in `verify.gradients`.
          params: Pytree; its floating arrays are given in `dtype`, as the batch's are.
          batch: Pytree.
          trainer: `trainer(params, batch) -> (loss, gradient)`, or several by name.
          **options: As of `verify.gradients`.

        Returns:
          The report, which is ok.

        Raises:
          VerificationError: It is not; the message is the report.
          Exception: What `verify.gradients` raises.
        """
        __tracebackhide__ = True
        with self._precision():
            from jdist import verify

            params, batch = self._cast((params, batch))
            report = verify.gradients(
                loss_fn, params, batch, _named(trainer), **options
            )
        return self._passed(report)

    def step(
        self,
        loss_fn: Callable[..., Any],
        update: Callable[..., Any],
        state: Any,
        batches: Any,
        trainer: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        **options: Any,
    ) -> Report:
        """Judges whole training steps, as `verify.step` does.

        Args:
          loss_fn: As in `verify.step`; without `trainer` the step function.
          update: As in `verify.step`; without `trainer` the reference step.
          state: Pytree; its floating arrays are given in `dtype`, as the batches' are.
          batches: List of pytrees, one for each step.
          trainer: The candidate of `verify.step`, or several by name.
          **options: As of `verify.step`.

        Returns:
          The report, which is ok.

        Raises:
          VerificationError: It is not; the message is the report.
          Exception: What `verify.step` raises.
        """
        __tracebackhide__ = True
        with self._precision():
            from jdist import verify

            given: Any = (loss_fn, update, *self._cast((state, batches)))
            if trainer is not None:
                given += (_named(trainer),)
            report = verify.step(*given, **options)
        return self._passed(report)

    def _precision(self) -> AbstractContextManager[None]:
        """Switches 64-bit types on, where they are asked for."""
        if self.dtype != "float64":
            return nullcontext()
        from jdist._compat import double_precision

        return double_precision()

    def _cast(self, trees: Any) -> Any:
        """The trees with their real floating arrays in `dtype`."""
        import jax
        import jax.numpy as jnp

        if self.dtype is None:
            return trees
        dtype = jnp.dtype(self.dtype)

        def cast(leaf: Any) -> Any:
            given = getattr(leaf, "dtype", None)
            floating = given is not None and jnp.issubdtype(given, jnp.floating)
            return leaf.astype(dtype) if floating else leaf

        return jax.tree.map(cast, trees)

    def _passed(self, report: Report) -> Report:
        """The report, if it is ok; raises it as the test's failure if not."""
        __tracebackhide__ = True
        if report.ok:
            return report
        # pytest puts eight characters before each line.
        columns = shutil.get_terminal_size((110, 0)).columns - 8
        dtype = f"\njudged with --jdist-dtype={self.dtype}" if self.dtype else ""
        raise VerificationError(
            f"the trainer is not proved right\n{report.text(columns)}{dtype}"
        )


def _named(
    trainer: Callable[..., Any] | Mapping[str, Callable[..., Any]],
) -> Mapping[str, Callable[..., Any]]:
    return trainer if isinstance(trainer, Mapping) else {"trainer": trainer}
