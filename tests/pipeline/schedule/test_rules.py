"""The rules of a schedule beside a plain checker, on right and on broken schedules."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.pipeline import ScheduleError
from jdist.pipeline.schedule.actions import Action, Columns
from jdist.pipeline.schedule.schedule import Schedule


def in_a_valid_order(draw, stages, micro_batches, owner):
    """Each worker's actions, drawn one by one among those that are ready, in haste."""
    todo = {Action(k, j, i) for k in "FB" for j in range(stages) for i in micro_batches}
    todo |= {
        Action("W", j, i)
        for j in range(stages)
        for i in micro_batches
        if draw(st.booleans())
    }
    programs, clocks = {w: [] for w in owner.values()}, {}
    while len(clocks) < len(todo):
        ready = (a for a in todo - clocks.keys() if needed(a, stages) <= clocks.keys())
        action = draw(st.sampled_from(sorted(ready)))
        program = programs[owner[action.stage]]
        before = [clocks[a] for a in (*needed(action, stages), *program[-1:])]
        clocks[action] = max(before, default=-1) + 1  # any earlier would be too early
        program.append(action)
    workers = range(max(programs) + 1)
    found = [programs.get(w, []) for w in workers]
    return found, [[clocks[a] for a in program] for program in found]


def needed(action, stages):
    """What must have happened before an action."""
    kind, j, i = action
    if kind == "F":
        return {Action("F", j - 1, i)} if j else set()
    if kind == "W":
        return {Action("B", j, i)}
    return {Action("F", j, i)} | ({Action("B", j + 1, i)} if j < stages - 1 else set())


@st.composite
def schedules_that_may_be_broken(draw):
    """A right schedule with actions moved, dropped, repeated or of another kind."""
    stages, count = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    owner = {j: draw(st.integers(0, 2)) for j in range(stages)}
    programs, _ = in_a_valid_order(draw, stages, range(count), owner)
    for _ in range(draw(st.integers(0, 2))):
        program = draw(st.sampled_from([p for p in programs if p]))
        at = draw(st.just(0) | st.integers(0, len(program) - 1))
        change = draw(st.sampled_from(["drop", "repeat", "kind", *["swap"] * 4]))
        if change == "drop" and len(program) > 1:
            del program[at]
        elif change == "repeat":
            program.append(program[at])
        elif change == "kind":
            program[at] = program[at]._replace(kind=draw(st.sampled_from("FBW")))
        else:
            program[at - 1], program[at] = program[at], program[at - 1]
    return Schedule(
        "drawn",
        count,
        tuple((owner[j],) for j in range(stages)),
        Columns.of(programs),
    )


def rule_broken(schedule):
    """The first rule that a schedule breaks, action by action; None: it keeps all."""
    stages, count = schedule.stages, schedule.micro_batches
    programs = [schedule.actions(w) for w in range(schedule.workers)]
    each = Counter(action for program in programs for action in program)
    wanted = [(k, j, i) for k in "FB" for j in range(stages) for i in range(count)]
    homes = (a for w, p in enumerate(programs) for a in p if w != home(schedule, a))
    if any(each[a] != 1 for a in wanted) or max(each.values()) > 1 or any(homes):
        return "complete"
    done, moved = set(), True
    while moved:
        moved = False
        for program in programs:
            while program and needed(program[0], stages) <= done:
                done.add(program.pop(0))
                moved = True
    return "dependencies" if any(programs) else None


def home(schedule, action):
    return schedule.worker(action.stage, action.micro_batch)


@settings(deadline=None, max_examples=300)
@given(schedule=schedules_that_may_be_broken())
def test_the_rule_that_a_plain_checker_finds(schedule):
    """The same one is broken, or none."""
    try:
        schedule.validate()
        found = None
    except ScheduleError as error:
        found = error.rule
    assert found == rule_broken(schedule)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_order_that_works_survives_csv(data):
    stages, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    owner = dict(enumerate(data.draw(st.permutations(range(stages)))))
    lists, clock = in_a_valid_order(data.draw, stages, range(count), owner)
    schedule = Schedule.of(lists).validate()
    assert schedule.clock.tolist() == [c for row in clock for c in row]
    assert Schedule.from_csv(schedule.to_csv()) == schedule
