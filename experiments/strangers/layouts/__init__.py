"""Trainers of other packages in layouts of their options, judged by `verify.fuzz`.

Each module has the axes and functions of one trainer, around the model of `llama`:

    python -m experiments.strangers.layouts tunix

in an environment that has jdist and the packages which the module names.
"""
