"""How long is a data-parallel training step over two processes, beside torch's DDP?"""

from benchmarks import _ddp_jdist, _ddp_torch
from benchmarks._ddp_models import MODELS, Model
from benchmarks._harness import Case, Timing, timing
from benchmarks._pair import Pair
from jdist.rpc.process_settings import ProcessSettings
import time

SETTINGS = ProcessSettings()
PARTS = ("step", "computation", "communication")

def measure(rounds=30, only=None) -> list[Case]:
    with (
        Pair(_ddp_jdist.prepare, SETTINGS) as ours,
        Pair(_ddp_torch.prepare, None) as shipped,
        Pair(_ddp_torch.prepare, SETTINGS) as same,
    ):
        contenders = {"jdist": ours, "torch as shipped": shipped, "torch, same settings": same}
        return [_case(model, contenders, rounds) for model in MODELS]

def _case(model: Model, contenders, rounds) -> Case:
    seconds = {f"{part}, {name}": [] for part in PARTS for name in contenders}
    for turn in range(rounds + 3):
        for part in PARTS:
            for name, pair in contenders.items():
                t = pair.run(f"{model.name}: {part}", model.calls)
                if turn >= 3:
                    seconds[f"{part}, {name}"].append(t)
    return Case(model.name, {k: timing(v) for k, v in seconds.items()})
