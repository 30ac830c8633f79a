"""What experiments say is what they judged: planted measurements change the verdicts,
the line at the end and the exit status; and no sentence comes from elsewhere."""

import ast
import inspect
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import __main__ as command
from experiments import (
    _runner,
    data_parallel_equivalence,
    ddp_buckets,
    ddp_equivalence,
    ddp_join,
    dist_autograd_simple,
    elastic_training,
    fuzz_study,
    gradient_compression,
    judge_cost,
    judge_tightness,
    llama_scale,
    optimizer_parity,
    rpc_cost,
    toy_model_parallel,
    trace_study,
    zero_memory,
)
from experiments._result import Result
from jdist import verify

STEPS = 4


# --- measurements that bear every claim out ---


def replicated(**changes):
    job = data_parallel_equivalence
    losses = [1.0, 0.5, 0.25, 0.125]
    alone = job.Run("1 device", losses, 0.97, [])
    orders = [job.Run("order", [x + 1e-6 for x in losses], 0.97, [])]
    run = job.Run(
        "2 devices",
        [x + 1e-6 for x in losses],
        0.97,
        [0.5] * STEPS,
        STEPS,
        "pinned by differences",
        (50.0,) * STEPS,
    )
    return job.claims(alone, orders, [replace(run, **changes)], job.Plan(STEPS))


def bucketed(worst=0.5, source=(4, 4), one=(1, 1), other=(2, 3)):
    counts = {ddp_buckets.SOURCE: {"0": source, "25": one}, "x": {"1": other}}
    return ddp_buckets.claims(counts, worst)


def equivalent(right=0.5, hand=0.5, mistake=9.0, copies=("a", "a"), other=1.0):
    job = ddp_equivalence

    def findings(value, copies):
        return job.Findings(
            "2", {("mean", "x", (1,)): np.float32(value)}, {"x": copies}
        )

    pair = [findings(1.0, list(copies)), findings(other, list(copies))]
    ratios = {"a": right}, {"b": hand}, {"c": mistake}
    return job.claims(pair, [pair], *ratios)


def joined(**changes):
    job = ddp_join
    run = job.Run(
        {"weight": [0.5] * 4, "active": [9.0, 9.0, 9.0, 0.5], "initial": [9.0] * 4},
        {"weight": [1.0] * 4, "active": [1.0] * 4, "initial": [1.0, 1.0, 0.5, 0.25]},
        [4, 4, 2, 1],
        [True, False, False, True],
        [1.0] * 4,
        4,
        0.9,
        100.0,
        "replicas 3 of 4 ran out",
    )
    return job.claims(replace(run, **changes), 4, 100, devices=True)


def elastic(**changes):
    job = elastic_training
    alone = job.Run([2.0, 1.0, 0.5], [np.float32([1, 2])], {0: [0, 1, 2]}, [])
    shares = {0: [0, 1, 2], 1: [0, 0], 2: [1, 2]}
    found = replace(alone, shares=shares, died=[1])
    history = job.History(2, {1: 1}, (1,))
    runs = {"alone": alone, "fixed": replace(found, **changes)}
    return job.claims(runs, history, 3, 0.9)


def scaled(needed=9.0, step=1.5, kept=2.0, found=None):
    job = llama_scale

    def plan(name, activations, step=step):
        memory = {"parameters": needed - activations, "activations": activations}
        timeline = types.SimpleNamespace(makespan=step)
        return job.Planned("slice", name, [3, 2], memory, 10, timeline, 1.0)

    families = plan("GPipe", 4.0, 1.7), plan("1F1B", kept), plan("ZB-H1", 3.0, 1.6)
    interleaved = plan("interleaved", 3.0, 1.1), plan("found, two parts", 3.0, 1.1)
    found = plan("found", 3.0, found or step)
    return job.claims([*families, *interleaved, found], [])


def scripted(**changes):
    job = dist_autograd_simple
    first, second = np.float32([1, 2]), np.float32([3, 4])
    one = job.Trained([1.0, 0.5], [first, second], [second, first])
    found = one._replace(**changes)
    return [
        *job.judged([found] * 2, [one] * 2),
        job.beside_torch([found] * 2, [one] * 2),
    ]


def compressed(**changes):
    job = gradient_compression
    share = {
        "fp16": 0.5,
        "int8 per channel, feedback": 0.52,
        "int8 per tensor": 0.5,
        "PowerSGD rank 1": 0.4,
        "PowerSGD rank 1, no feedback": 0.4,
    }
    runs = {job.EXACT: job.Run(job.EXACT, [1.0], 0.97, 1000.0)}
    for name, part in share.items():
        loss = 2.0 if "no feedback" in name else 1.0
        runs[name] = job.Run(name, [loss], 0.97, 1000.0 * part)
    for name, (field, value) in changes.items():
        runs[name] = replace(runs[name], **{field: value})
    return job.claims(list(runs.values()), quick=False)


def beside_torch(double=1e-13, single=1e-6, same=1e-14, other=1e-3):
    curves = {
        name: np.array([same if counterpart[2] else other])
        for name, counterpart in optimizer_parity.COUNTERPARTS.items()
    }
    worst = {"float64": double, "float32": single}
    return optimizer_parity.claims(worst, ["a"], curves)


def called(ours=0.1, bare=1.0, inside=1e-6, same=True):
    job = rpc_cost
    taken = {job.TORCH: 1.0, job.BARE: bare, job.NUMPY: ours, job.JAX: ours}
    seconds = {who: {what: [t] for what in job.GOALS} for who, t in taken.items()}
    return [*job.echo_claims({"x": same}), *job.speed_claims(seconds, [inside])]


def verdicts(size="14 M", seconds=None, memory=1.0, peak=12.0, **verdicts):
    """At a second a step, a name for each judgement."""
    job = judge_cost
    judged = {job.RIGHT: True, job.GROSS: False, job.FINE: False, job.UNTIED: False}
    taken = {job.COLD: 1.5, **dict.fromkeys(judged, 0.5)}
    cost = job.Cost(10, 1.0, taken, judged, 40, 12 * job.GIB)
    changed = cost._replace(
        seconds={**taken, **(seconds or {})},
        verdicts={**judged, **{getattr(job, k): v for k, v in verdicts.items()}},
        memory=int(memory * 40),
        peak=int(peak * job.GIB),
    )
    costs = {**dict.fromkeys(job.SIZES, cost), size: changed}
    return [*job.verdict_claims(costs), *job.cost_claims(costs)]


def passed(**changes):
    job = toy_model_parallel
    run = job.Run([0.5] * 4, 4, [1.0, 0.5], "must have 'target' on cpu:1")
    return job.claims(replace(run, **changes), 4, two=True)


PARAMS = {"w": np.zeros((64, 8), np.float32)}


def sharded(final=None, **changes):
    job = zero_memory
    whole, part = job.share(PARAMS, 1), job.share(PARAMS, 2)
    runs = [
        job.Run(2, False, [1], [whole] * 2, 9000, [1.0, 0.5], STEPS, None),
        job.Run(2, True, [1], [part] * 2, 9000 - whole + part, [1.0, 0.5], STEPS, None),
    ]
    at = 0 if changes.pop("whole", False) else 1
    runs[at] = runs[at]._replace(**changes)
    return job.claims(runs, {1: True, 2: final is None}, PARAMS, STEPS)


# One change that contradicts each claim; the number is the claim's.
def tight(right=True, **largest):
    wanted = {**judge_tightness.WANTED, **largest}
    cells = {("m", d, n): e / n for d, e in wanted.items() for n in (1, 2)}
    return judge_tightness.claims(cells, dict.fromkeys(cells, right))


def placed(found=40, named=38, condemned=0, blind=0, planted=40):
    def finding(kind, verdict, right_place):
        place = (verdict, right_place, "", "")
        return trace_study.Finding(kind, "t", "bfloat16", 1.0, *place)

    faults = [finding("sign", "found", i < named) for i in range(found)]
    faults += [finding("sign", "passed", False) for i in range(40 - found)]
    rights = [finding("", "found", False)] * condemned
    rights += [finding("", "not judged", False)] * blind
    rights += [finding("", "passed", False)] * (20 - condemned - blind)
    part = trace_study.Part(layers=3, defects=planted, right=20, demanded=0.5)
    return trace_study.claims(faults, rights, [part])


def fuzzed(sizes=(1, 2, 2, 3), missed=0, extra=(), outcome="right"):
    def found(number, size, strength):
        axes = tuple("abc"[:size])
        first = 0 if strength == missed else 1
        left = ((*axes, *extra),) if first else ()
        own = f"f{number}", axes, strength, first, 11, 20, 1.0, left, 0
        return fuzz_study.Found(*own)

    cells = [found(n, size, s) for n, size in enumerate(sizes) for s in (2, 3)]
    return fuzz_study.claims(cells, [verify.Verdict({}, outcome)], 4)


PLANTED = [
    (replicated, 0, {"ratios": [0.5, 1.01, 0.5, 0.5]}),
    (replicated, 0, {"ratios": [0.5] * (STEPS - 1)}),
    (replicated, 1, {"oracle": "not compared"}),
    (replicated, 2, {"identical": STEPS - 1}),
    (replicated, 3, {"losses": [1.0, 0.5, 0.25, 0.126]}),
    (replicated, 4, {"accuracy": 0.94}),
    (replicated, 5, {"caught": (50.0, 0.9, 50.0, 50.0)}),
    (bucketed, 0, {"other": (2, 4)}),
    (bucketed, 1, {"source": (3, 3)}),
    (bucketed, 2, {"worst": 1.5}),
    (equivalent, 0, {"right": 1.5}),
    (equivalent, 1, {"hand": 1.5}),
    (equivalent, 2, {"mistake": 0.5}),
    (equivalent, 3, {"copies": ("a", "b")}),
    (equivalent, 4, {"other": 1.0000001}),
    (joined, 1, {"seen": 99.0}),
    (joined, 4, {"early_end": "replicas 2 of 4"}),
    (joined, 5, {"identical": 3}),
    (joined, 6, {"accuracy": 0.8}),
    (scripted, 0, {"gradients": [np.float32([1, 2]), np.float32([3, 4.0000005])]}),
    (scripted, 1, {"values": [np.float32([3, 4]), np.float32([1, 2.0000002])]}),
    (scripted, 2, {"losses": [1.0, 0.8]}),
    (compressed, 0, {"fp16": ("accuracy", 0.95)}),
    (compressed, 1, {"fp16": ("sent", 520.0)}),
    (compressed, 4, {"PowerSGD rank 1": ("sent", 460.0)}),
    (compressed, 5, {"PowerSGD rank 1": ("losses", [2.5])}),
    (beside_torch, 0, {"double": 1e-11}),
    (beside_torch, 1, {"single": 1e-4}),
    (beside_torch, 2, {"same": 1e-11}),
    (beside_torch, 3, {"other": 1e-13}),
    (called, 0, {"same": False}),
    (called, -1, {"inside": 31e-6}),
    (passed, 0, {"ratios": [0.5, 1.2]}),
    (passed, 1, {"identical": 3}),
    (passed, 2, {"losses": [1.0, 1.0]}),
    (passed, 3, {"refusal": "nothing was refused"}),
    (sharded, 0, {"state": [99, 98]}),
    (sharded, 2, {"whole": True, "state": [5, 5]}),
    (sharded, 3, {"program": 1}),
    (sharded, 4, {"losses": [1.0, 0.501]}),
    (sharded, 5, {"identical": STEPS - 1}),
    (sharded, 6, {"final": "another"}),
    (verdicts, 0, {"RIGHT": False}),
    (verdicts, 1, {"GROSS": True}),
    (verdicts, 2, {"size": "124 M", "FINE": True}),
    (verdicts, 3, {"UNTIED": True}),
    (verdicts, 4, {"seconds": {judge_cost.RIGHT: 15.1, judge_cost.COLD: 16.0}}),
    (verdicts, 5, {"seconds": {judge_cost.GROSS: 30.1}}),
    (verdicts, 6, {"seconds": {judge_cost.FINE: 60.1}}),
    (verdicts, 7, {"seconds": {judge_cost.UNTIED: 60.1}}),
    (verdicts, 8, {"size": judge_cost.MANY, "seconds": {judge_cost.RIGHT: 20.1}}),
    (verdicts, 9, {"size": "0.5 M", "seconds": {judge_cost.RIGHT: 0.61}}),
    (verdicts, 10, {"size": "0.5 M", "seconds": {judge_cost.COLD: 12.1}}),
    (verdicts, 11, {"size": "0.5 M", "seconds": {judge_cost.GROSS: 19.1}}),
    (verdicts, 12, {"seconds": {judge_cost.COLD: 35.1}}),
    (verdicts, 13, {"size": "124 M", "seconds": {judge_cost.COLD: 300.1}}),
    (verdicts, 17, {"memory": 20.1}),
    (verdicts, 18, {"size": "124 M", "peak": 12.1}),
    (tight, 0, {"float64": 1.1e-13}),
    (tight, 1, {"float32": np.inf}),
    (tight, 2, {"bfloat16": 0.11}),
    (tight, 3, {"float16": 0.021}),
    (tight, 4, {"right": False}),
    (placed, 0, {"planted": 41}),
    (placed, 1, {"found": 39}),
    (placed, 2, {"named": 37}),
    (placed, 3, {"condemned": 1}),
    (placed, 3, {"blind": 1}),
    (fuzzed, 0, {"sizes": (1, 2, 3)}),
    (fuzzed, 0, {"sizes": (1, 2, 2, 2)}),
    (fuzzed, 1, {"missed": 2}),
    (fuzzed, 2, {"missed": 3}),
    (fuzzed, 3, {"extra": ("d",)}),
    (fuzzed, 4, {"outcome": "not judged"}),
    (elastic, 0, {"losses": [2.0, 1.0000001, 0.5]}),
    (elastic, 0, {"losses": [2.0, 1.0]}),
    (elastic, 1, {"params": [np.float32([1, 2.0000002])]}),
    (elastic, 2, {"died": []}),
    (elastic, 2, {"shares": {0: [0], 1: [0], 2: []}}),
    (scaled, 0, {"needed": 10.1}),
    (scaled, 1, {"step": 0.9}),
    (scaled, 2, {"kept": 4.0}),
    (scaled, 3, {"found": 1.51}),
]


@pytest.mark.parametrize("made", dict.fromkeys(made for made, *_ in PLANTED))
def test_what_bears_them_out_holds(made):
    assert [c.text for c in made() if c.holds is not True] == []


@pytest.mark.parametrize(("made", "number", "change"), PLANTED)
def test_a_contradiction_is_said_and_fails(made, number, change):
    """In the line that a run ends with, from which the exit status follows."""
    claims = list(made(**change))
    claim = claims[number]
    assert claim.verdict == "does not hold"
    found = Result(claims)
    assert not found.holds
    assert f"Does not hold: {claim.sentence}" in found.outcome
    before = Result(list(made()))
    assert before.holds
    assert f"{len(claims)} of {len(claims)} claims hold" in before.outcome


def test_the_command_ends_with_it(tmp_path, monkeypatch, capsys):
    """Exit status 1 and FAILED, with a planted measurement; 0 and Proved without."""
    for change, status, word in (({}, 0, "Proved"), ({"identical": 3}, 1, "FAILED")):
        module = types.ModuleType("experiments.planted", "Is it planted?")
        found = Result(passed(**change))
        module.run = lambda settings, progress, found=found: found
        monkeypatch.setitem(sys.modules, "experiments.planted", module)
        monkeypatch.setattr(_runner, "names", lambda: ["planted"])
        monkeypatch.setattr(command.jax.config, "update", lambda *_: None)
        assert command.main(["planted", "--out", str(tmp_path)]) == status
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"{word} (")
        assert found.outcome in last


def test_calls_of_each_size_are_judged():
    """Beside torch, and beside a bare socket."""
    job = rpc_cost
    slow = [c.text for c in called(ours=1.01) if not c.holds]
    assert len(slow) == 2 * sum(goal < 1.01 for goal in job.GOALS.values())
    beside = [c.text for c in called(bare=0.01) if not c.holds]
    assert len(beside) == 2 * len(job.LARGE)


def test_divisors_are_told_apart():
    """An uneven step at which the wrong divisor passes; a length that stays."""
    ratios = {"weight": [0.5] * 4, "active": [9.0, 0.9, 9.0, 0.5], "initial": [9.0] * 4}
    assert [c.holds for c in joined(ratios=ratios)].index(False) == 2
    ratios = {**ratios, "active": [9.0] * 4, "weight": [0.5, 0.5, 2.0, 0.5]}
    assert [c.holds for c in joined(ratios=ratios)].index(False) == 0
    lengths = {"weight": [1.0] * 4, "active": [1.0] * 4, "initial": [1.0] * 4}
    assert [c.holds for c in joined(lengths=lengths)].index(False) == 3


def test_what_cannot_be_judged_says_so():
    """Replicas on one device, no torch, methods that were not run, no second device."""
    job = ddp_join
    run = job.Run(
        {"weight": [0.5], "active": [9.0, 9.0], "initial": [9.0]},
        {"weight": [1.0], "active": [1.0, 1.0], "initial": [1.0, 0.25]},
        [4, 1],
        [False, True],
    )
    (left,) = [c for c in job.claims(run, 2, 0, devices=False) if c.holds is None]
    assert left.why_not == "replicas share a device by vmap"
    shared = data_parallel_equivalence.claims
    alone = data_parallel_equivalence.Run("1", [1.0], 0.97, [])
    other = replace(alone, ratios=[0.5], caught=(9.0,), oracle="pinned")
    plan = data_parallel_equivalence.Plan(1)
    found = shared(alone, [alone], [other], plan, "few")
    (left,) = [c for c in found if c.holds is None]
    assert (left.why_not, "same bits" in left.text) == ("few", True)
    assert dist_autograd_simple.beside_torch([], None).verdict == "not judged"
    exact = gradient_compression.Run(gradient_compression.EXACT, [1.0], 0.97, 0.0)
    runs = [exact, replace(exact, name="fp16")]
    reasons = [c.why_not for c in gradient_compression.claims(runs, quick=True)]
    assert reasons[1:] == [
        "replicas share a device: no bytes are sent",
        *[gradient_compression.NOT_RUN] * 4,
    ]
    toy = toy_model_parallel
    run = toy.Run([0.5], 1, [1.0, 0.5])
    assert toy.claims(run, 1, two=False)[-1].why_not == "there is one device only"
    (left,) = zero_memory.left_out(["8"])
    assert "8 replicas" in left.sentence
    seconds = {
        name: {job: [1.0] for job in rpc_cost.GOALS}
        for name in (rpc_cost.BARE, rpc_cost.NUMPY, rpc_cost.JAX)
    }
    left = [c for c in rpc_cost.speed_claims(seconds, [1e-6]) if c.holds is None]
    assert len(left) == 2 * len(rpc_cost.GOALS)


def test_dtypes_that_were_not_run_are_not_judged():
    seen = {("m", "float32", 8): 1e-5}
    left = [
        c
        for c in judge_tightness.claims(seen, {("m", "float32", 8): True})
        if c.holds is None
    ]
    assert [c.why_not for c in left] == [judge_tightness.NOT_RUN] * 3


# --- there is no other place for a sentence about a result ---

FOLDER = Path(_runner.experiments.__path__[0])
MODULES = sorted([*FOLDER.glob("[a-z]*.py"), *FOLDER.glob("[a-z]*/__init__.py")])
JUDGING = re.compile(
    r"\b(faster|slower|fewer|better|worse|wins?|gains? more|loses?|never|always|proves?"
    r"|proved|same|equals?|equal to|exactly|identical|bit for bit|lies? on|beats?"
    r"|holds?|as well|no more than|at least|at most|agrees?)\b"
)
ALLOWED = {
    # How something was measured, drawn or counted.
    "for slower and slower links",
    "whiskers hold the middle half",
    "two equal halves",
    "the same, and the two halves",
    "8-bit integers cannot be summed",
}


def prose(path):
    """Captions and notes: the strings beside which no verdict stands."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Picture":
            found += [node.args[1]] if len(node.args) > 1 else []
        if isinstance(node, ast.keyword) and node.arg == "notes":
            found.append(node.value)
        if isinstance(node, ast.FunctionDef) and "note" in node.name:
            found += node.body[1:]
        if isinstance(node, ast.Assign) and "caption" in ast.dump(node.targets[0]):
            found.append(node.value)
    for part in found:
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.lower()


def test_a_judgement_is_recognised():
    """Those that once stood beside measurements of the contrary."""
    told = sum(len(list(prose(path))) for path in MODULES)
    assert told > 30
    for text in (
        "sent in parts it wins more than that back",
        "both runs are one line: they are the same to the bit",
        "the slower the network, the more a pipeline gains: it gains more",
        "it learns as well without",
        "the loss curves lie on each other",
    ):
        assert JUDGING.search(text)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_caption_and_no_note_judges(path):
    for text in prose(path):
        if not any(known in text for known in ALLOWED):
            assert not JUDGING.search(text), text


@pytest.mark.parametrize("name", _runner.names())
def test_an_experiment_asks(name):
    """Its summary is printed before anything is measured, so that it cannot know."""
    assert "?" in _runner.summary(_runner.load(name))
    assert "claims" in inspect.getsource(_runner.load(name).run)
