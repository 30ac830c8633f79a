"""The independent judge: compares any two ways to a gradient.

It imports no strategy, and no strategy imports it. `compare` judges two gradient trees;
`gradients` judges functions, and measures for itself how far apart right answers may
be; `judge` does so at every step of a run; `step` judges whole optimizer steps by the
new parameters. `python -m jdist.verify` judges every
strategy that is installed.
"""

from jdist.verify.compare import compare as compare
from jdist.verify.gradients import gradients as gradients
from jdist.verify.gradients import judge as judge
from jdist.verify.problem import Problem as Problem
from jdist.verify.report import LeafReport as LeafReport
from jdist.verify.report import OracleCheck as OracleCheck
from jdist.verify.report import Report as Report
from jdist.verify.step import step as step
