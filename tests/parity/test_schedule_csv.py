"""torch's own schedule files read here, and ours read by torch's `_load_csv`."""

import csv
import json
import subprocess
import sys

import pytest

from jdist import pipeline
from jdist.pipeline import Schedule

pytestmark = pytest.mark.parity

OURS = {
    "gpipe": pipeline.gpipe(3, 4),
    "1f1b": pipeline.one_f_one_b(3, 5),
    "interleaved": pipeline.interleaved(2, 4, 3),
    "few": pipeline.interleaved(4, 2, 2),
    "looped_bfs": pipeline.looped_bfs(3, 2, 2),
    "zero_bubble": pipeline.zero_bubble(3, 4),
    "zbv": pipeline.zbv(3, 4),
    "dualpipe_v": pipeline.dualpipe_v(2, 5),
}
SAME_ORDER = {
    "ScheduleGPipe": lambda n, m: pipeline.gpipe(n, m),
    "Schedule1F1B": lambda n, m: pipeline.one_f_one_b(n, m),
    "ScheduleInterleaved1F1B": lambda n, m: pipeline.interleaved(n, m, 2),
    "ScheduleDualPipeV": lambda n, m: pipeline.dualpipe_v(n, m),
}
"""The others of torch order some actions differently from ours."""

TORCH = """
import csv, json, sys, warnings
import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

class Stage(_PipelineStageBase):
    def __init__(self, index, stages, workers):
        self.stage_index, self.num_stages, self.group_size = index, stages, workers
        self.group_rank, self.has_backward = 0, True
        self.submod = torch.nn.Linear(1, 1)

Stage.__abstractmethods__ = frozenset()
folder = sys.argv[1]

for name in ("GPipe", "1F1B"):
    cls = getattr(schedules, "Schedule" + name)
    for n, m in ((1, 3), (2, 4), (3, 3), (4, 7)):
        order = cls(Stage(0, n, n), m)._get_pipeline_order()
        path = f"{folder}/{cls.__name__}-{n}-{m}-order.csv"
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(order[rank] for rank in order)
for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
             "ZBVZeroBubble", "DualPipeV"):
    cls = getattr(schedules, "Schedule" + name)
    for n, m in ((1, 2), (2, 4), (2, 6), (3, 2), (3, 6), (4, 2), (4, 8)):
        if name == "DualPipeV" and m < 2 * n:
            continue
        made = cls([Stage(i, 2 * n, n) for i in (0, n)], m, loss_fn=None)
        for form in ("compute_only", "compute_comms"):
            made._dump_csv(f"{folder}/{cls.__name__}-{n}-{m}-{form}.csv", form)

read = {}
for name, (stages, workers, m) in json.loads(sys.argv[2]).items():
    own = [Stage(i, stages, workers) for i in range(stages // workers)]
    runtime = schedules._PipelineScheduleRuntime(own, m, loss_fn=None)
    runtime.pipeline_order = {}
    runtime._load_csv(f"{folder}/ours-{name}.csv")
    kept = {rank: [a for a in actions if a.microbatch_index is not None]
            for rank, actions in runtime.pipeline_order_with_comms.items()}
    to_rank = runtime.stage_index_to_group_rank
    schedules._simulate_comms_compute(kept, lambda stage: to_rank[stage], stages)
    read[name] = [[str(a) for a in actions if a is not None]
                  for actions in runtime.pipeline_order.values()]
print(json.dumps(read))
"""


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """A folder of torch's files, and what torch read of ours."""
    folder = tmp_path_factory.mktemp("schedules")
    for name, schedule in OURS.items():
        schedule.to_csv(folder / f"ours-{name}.csv")
    sizes = {k: (s.stages, s.workers, s.micro_batches) for k, s in OURS.items()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH, str(folder), json.dumps(sizes)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_torch_reads_and_runs_dry_what_is_written_here(torchs):
    """Every family in its order; torch finds messages that do not deadlock."""
    _, read = torchs
    for name, schedule in OURS.items():
        rows = csv.reader(schedule.to_csv().splitlines())
        assert read[name] == [[cell for cell in row if cell] for row in rows], name


def test_what_torch_writes_is_read_here(torchs):
    """Both formats of `_dump_csv`; in torch's order, and ours where they agree."""
    folder, _ = torchs
    files = sorted(folder.glob("Schedule*.csv"))
    assert len(files) == 2 * 4 + (4 * 7 + 5) * 2
    for path in files:
        name, n, m, form = path.stem.split("-")
        schedule = Schedule.from_csv(path)
        assert (schedule.workers, schedule.micro_batches) == (int(n), int(m)), path
        if name in SAME_ORDER:
            own = SAME_ORDER[name](int(n), int(m))
            assert schedule.columns == own.columns, path
            assert schedule.placement == own.placement, path
        elif form == "compute_only":
            text = path.read_text().replace("I", "B")
            order = [[c for c in row if c] for row in csv.reader(text.splitlines())]
            assert schedule.columns == Schedule.of(order).columns, path
        else:
            plain = path.with_stem(path.stem.replace("comms", "only"))
            assert schedule.columns == Schedule.from_csv(plain).columns, path
