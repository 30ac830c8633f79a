"""The algorithms under test: their options, and problems that can tell them apart.

A problem is a list of random parameters with distinct shapes and magnitudes, and
gradients over several magnitudes that change from step to step; a pattern says which
gradients are None. One leaf always has a gradient of zero.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from jdist import optim

STEPS = 50
SHAPES = ((3, 5), (7,), (), (2,))
MATRICES = ((3, 5), (7, 2), (1, 4), (2, 2))
ZERO_LEAF = 3


@dataclass(frozen=True)
class Algorithm:
    """One optimizer: its torch name, options to draw, recorded, and to override."""

    torch_name: str
    options: dict
    golden: dict
    has_lr_default_of_torch_optim: bool = True
    overridable: dict = field(default_factory=dict)
    elementwise: bool = True
    shapes: tuple = SHAPES

    @property
    def name(self):
        return self.torch_name.lower()

    @property
    def inputs(self):
        """The golden file of its problem."""
        return "inputs" if self.shapes == SHAPES else "matrices"

    @property
    def shapes_of_nine(self):
        """Shapes of nine numbers: a vector, and a matrix where they differ."""
        shapes = () if self.shapes == MATRICES else ((9,),)
        return shapes if self.elementwise else (*shapes, (3, 3))

    def problem(self, seed, **options):
        """A problem of the shapes that it takes; see `problem`."""
        return problem(seed, shapes=self.shapes, **options)

    def __call__(self, **options):
        return getattr(optim, self.name)(**options)


def _numbers(low, high):
    return st.floats(low, high, allow_nan=False)


def _pair(first, second):
    return st.tuples(first, second)


LR = st.sampled_from([0.0, 1e-4, 1e-3, 0.03, 0.1])
DECAY = st.sampled_from([0.0, 1e-3, 0.1])
EPS = st.sampled_from([1e-10, 1e-8, 1e-3])
# Up to 0.999: nearer to 1, torch's own `1 - beta**t` in float64 is off by more than
# the 1e-12 that is asked for.
BETAS = _pair(_numbers(0.0, 0.99), _numbers(0.5, 0.999))
BOOL = st.booleans()

ALGORITHMS = [
    Algorithm(
        "SGD",
        {
            "lr": LR,
            "momentum": _numbers(0.0, 0.99),
            "dampening": _numbers(0.0, 0.9),
            "weight_decay": DECAY,
            "nesterov": BOOL,
            "maximize": BOOL,
        },
        {
            "plain": {"lr": 0.01},
            "momentum": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
            "dampening": {"lr": 0.1, "momentum": 0.8, "dampening": 0.3},
            "nesterov": {
                "lr": 0.02,
                "momentum": 0.7,
                "nesterov": True,
                "maximize": True,
                "weight_decay": 0.01,
            },
        },
        has_lr_default_of_torch_optim=False,
        overridable={"lr": 0.07, "momentum": 0.6},
    ),
    Algorithm(
        "Adam",
        {
            "lr": LR,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAY,
            "amsgrad": BOOL,
            "maximize": BOOL,
            "decoupled_weight_decay": BOOL,
        },
        {
            "default": {},
            "amsgrad": {"lr": 0.03, "amsgrad": True, "weight_decay": 0.1},
            "maximize": {"betas": (0.8, 0.95), "maximize": True, "eps": 1e-3},
            "no memory": {"betas": (0.0, 0.9), "decoupled_weight_decay": True},
        },
        overridable={"lr": 0.07, "betas": (0.7, 0.9), "eps": 1e-4},
    ),
    Algorithm(
        "AdamW",
        {
            "lr": LR,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAY,
            "amsgrad": BOOL,
            "maximize": BOOL,
        },
        {
            "default": {},
            "amsgrad": {"lr": 0.03, "amsgrad": True, "weight_decay": 0.3},
            "maximize": {"maximize": True, "weight_decay": 0.2},
        },
        overridable={"lr": 0.07, "weight_decay": 0.5},
    ),
    Algorithm(
        "Adagrad",
        {
            "lr": LR,
            "lr_decay": st.sampled_from([0.0, 0.01, 1.0]),
            "weight_decay": DECAY,
            "initial_accumulator_value": st.sampled_from([0.0, 0.1, 3.0]),
            "eps": EPS,
            "maximize": BOOL,
        },
        {
            "default": {},
            "start": {"initial_accumulator_value": 0.7, "maximize": True},
            # Last, because the default lr_decay keeps no count and is not overridden.
            "lr_decay": {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1},
        },
        overridable={"lr": 0.07, "lr_decay": 0.2},
    ),
    Algorithm(
        "Adadelta",
        {
            "lr": st.sampled_from([0.0, 0.1, 1.0]),
            "rho": _numbers(0.0, 0.99),
            "eps": EPS,
            "weight_decay": DECAY,
            "maximize": BOOL,
        },
        {
            "default": {},
            "decay": {"lr": 0.5, "rho": 0.7, "weight_decay": 0.1, "maximize": True},
        },
        overridable={"lr": 0.3, "rho": 0.8},
    ),
    Algorithm(
        "RMSprop",
        {
            "lr": LR,
            # Centered with an alpha near 0 divides by the root of pure rounding error.
            "alpha": _numbers(0.5, 0.99),
            "eps": EPS,
            "weight_decay": DECAY,
            "momentum": st.sampled_from([0.0, 0.5, 0.9]),
            "centered": BOOL,
            "maximize": BOOL,
        },
        {
            "default": {},
            "centered": {"centered": True, "alpha": 0.9, "weight_decay": 0.1},
            "momentum": {"lr": 1e-3, "momentum": 0.9, "maximize": True},
            "both": {"centered": True, "momentum": 0.5, "eps": 1e-3, "lr": 1e-3},
        },
        overridable={"lr": 0.07, "alpha": 0.8},
    ),
    Algorithm(
        "Rprop",
        {
            "lr": LR,
            "etas": _pair(_numbers(0.1, 0.9), _numbers(1.05, 3.0)),
            "step_sizes": _pair(
                st.sampled_from([0.0, 1e-6, 1e-3]), st.sampled_from([0.5, 50.0])
            ),
            "maximize": BOOL,
        },
        {
            "default": {},
            "narrow": {
                "lr": 0.05,
                "etas": (0.3, 1.7),
                "step_sizes": (1e-3, 0.2),
                "maximize": True,
            },
        },
        overridable={"etas": (0.4, 1.5), "step_sizes": (1e-5, 0.5)},
    ),
    Algorithm(
        "Adamax",
        {
            "lr": LR,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAY,
            "maximize": BOOL,
        },
        {
            "default": {"lr": 2e-3},
            "decay": {
                "lr": 0.03,
                "betas": (0.8, 0.95),
                "weight_decay": 0.1,
                "maximize": True,
            },
        },
        has_lr_default_of_torch_optim=False,
        overridable={"lr": 0.07, "eps": 1e-4},
    ),
    Algorithm(
        "NAdam",
        {
            "lr": LR,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAY,
            "momentum_decay": st.sampled_from([0.0, 4e-3, 0.5]),
            "decoupled_weight_decay": BOOL,
            "maximize": BOOL,
        },
        {
            "default": {},
            "decay": {"lr": 0.03, "weight_decay": 0.1, "momentum_decay": 0.05},
            "decoupled": {
                "decoupled_weight_decay": True,
                "weight_decay": 0.2,
                "maximize": True,
            },
        },
        overridable={"lr": 0.07, "momentum_decay": 0.1},
    ),
    Algorithm(
        "RAdam",
        {
            "lr": LR,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAY,
            "decoupled_weight_decay": BOOL,
            "maximize": BOOL,
        },
        {
            "default": {},
            "short memory": {"lr": 0.03, "betas": (0.8, 0.9), "weight_decay": 0.1},
            "never rectified": {"betas": (0.9, 0.6), "maximize": True},
            "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.2},
        },
        overridable={"lr": 0.07, "eps": 1e-4},
    ),
    Algorithm(
        "ASGD",
        {
            "lr": LR,
            "lambd": st.sampled_from([0.0, 1e-4, 0.1]),
            "alpha": _numbers(0.0, 1.0),
            "t0": st.sampled_from([0.0, 7.0, 1e6]),
            "weight_decay": DECAY,
            "maximize": BOOL,
        },
        {
            "default": {},
            "averaging": {"t0": 20.0, "lambd": 0.05, "lr": 0.03},
            "decay": {"weight_decay": 0.1, "maximize": True, "alpha": 0.5, "t0": 3.0},
        },
        overridable={"lr": 0.07, "lambd": 0.01},
    ),
    Algorithm(
        "Adafactor",
        {
            "lr": LR,
            "beta2_decay": _numbers(-1.0, 0.0),
            "eps": _pair(
                st.sampled_from([None, 0.0, 1e-8, 1e-3]),
                st.sampled_from([0.0, 1e-3, 0.1]),
            ),
            "d": _numbers(1.0, 3.0),
            "weight_decay": DECAY,
            "maximize": BOOL,
        },
        {
            "default": {},
            "decay": {
                "lr": 0.1,
                "beta2_decay": -0.5,
                "eps": (1e-4, 0.01),
                "d": 1.5,
                "weight_decay": 0.1,
                "maximize": True,
            },
        },
        overridable={"lr": 0.07, "beta2_decay": -0.6},
        elementwise=False,
    ),
    Algorithm(
        "Muon",
        {
            "lr": LR,
            "weight_decay": DECAY,
            "momentum": _numbers(0.0, 0.99),
            "nesterov": BOOL,
            "ns_coefficients": st.sampled_from(
                [(3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)]
            ),
            "eps": EPS,
            "ns_steps": st.integers(0, 6),
            "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
        },
        {
            "default": {},
            "plain": {
                "lr": 0.03,
                "weight_decay": 0.0,
                "nesterov": False,
                "momentum": 0.5,
                "ns_coefficients": (2.0, -1.5, 0.5),
                "ns_steps": 3,
            },
            "adamw's rate": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"},
        },
        overridable={"lr": 0.07, "weight_decay": 0.3, "momentum": 0.7},
        elementwise=False,
        shapes=MATRICES,
    ),
]
ELEMENTWISE = [algorithm for algorithm in ALGORITHMS if algorithm.elementwise]
BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}


def options_of(algorithm):
    """Hypothesis's combinations, less the one that no optimizer accepts."""
    drawn = st.fixed_dictionaries(algorithm.options)
    return drawn.map(_admissible) if algorithm.name == "sgd" else drawn


def _admissible(options):
    """Nesterov momentum needs momentum and no dampening."""
    if not options["nesterov"]:
        return options
    return options | {"dampening": 0.0, "momentum": max(options["momentum"], 0.1)}


@dataclass(frozen=True)
class Problem:
    """Parameters, and per step one gradient or None per leaf."""

    params: list
    grads: list

    def cast(self, dtype):
        def one(x):
            return None if x is None else x.astype(dtype)

        return Problem(
            [one(p) for p in self.params], [[one(g) for g in row] for row in self.grads]
        )


def problem(seed, steps=STEPS, with_none=True, shapes=SHAPES):
    """Random values exactly representable in float32, so that all dtypes agree.

    Parameters are about 1, 30, 0.02 and 1; gradients about 1, 1e-3, 1e-5 and 0, times
    up to 30 either way from step to step. With None, the gradients of a step that are
    missing follow one of `PATTERNS`, and leaf 1 has its first gradient in step 4.
    """
    rng = np.random.default_rng(seed)
    sizes = (1.0, 30.0, 0.02, 1.0)
    slopes = (1.0, 1e-3, 1e-5, 0.0)

    def draw(shape, scale):
        return np.asarray(rng.standard_normal(shape) * scale, np.float32).astype(
            np.float64
        )

    params = [draw(shape, size) for shape, size in zip(shapes, sizes, strict=True)]
    grads = [
        [
            draw(shape, slope * 30.0 ** rng.uniform(-1, 1))
            for shape, slope in zip(shapes, slopes, strict=True)
        ]
        for _ in range(steps)
    ]
    if with_none:
        for row, missing in zip(grads, none_patterns(rng, steps), strict=True):
            for leaf in missing:
                row[leaf] = None
    return Problem(params, grads)


PATTERNS = ((), (1,), (0, 2), (0, 1, 2, 3))


def none_patterns(rng, steps):
    """Four patterns only, since each compiles once; leaf 1 starts late."""
    later = rng.choice(len(PATTERNS), size=steps, p=(0.6, 0.2, 0.15, 0.05))
    return [PATTERNS[1] if t < 3 else PATTERNS[k] for t, k in enumerate(later)]
