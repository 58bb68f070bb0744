"""Gloo worlds forked from a preloaded parent: layouts outside, cases inside.

A world of 2 / 4 / 8 opens in 0.06 / 0.09 / 0.17 s on two cores (with megatron-core's groups in 0.14 / 0.31 / 0.73 s), where a
cold one of 8 takes 30 s of imports, and a case with one all-reduce takes 0.9 / 2.1 / 4.3 ms. The price: whatever the parent did
before the fork is inherited (see `preload`).

    def norm(payload, worker):                      # in my_module; runs on every rank, here of a world of 2
        total = torch.tensor(payload["numbers"]).sum() * (worker.rank + 1)
        torch.distributed.all_reduce(total)
        return total

    preload()
    with open_world(2, enter="my_layouts:tensor_parallel", entry={"tensor": 2}) as world:
        per_rank = world.run("my_module:norm", {"numbers": [1, 2]})     # [tensor(9), tensor(9)]; CaseFailed if any fails

    for outcome in run_cases(2, (Case(target="my_module:norm", payload=p) for p in payloads)):
        ...                                         # outcome.results or outcome.failure; reopened after each failure

The same functions run under torchrun: `torchrun --nproc-per-node 2 -m equivalence.workers my_module:norm payload.json`.
"""

from equivalence.workers.cases import Case, Outcome, ReopeningWorld, reopening_world, run_cases
from equivalence.workers.failures import CaseFailed, Failure, RankReport, WorldNotOpened
from equivalence.workers.preload import preload
from equivalence.workers.seats import MOST_WORKERS
from equivalence.workers.waiting import Deadlines
from equivalence.workers.worker import Worker
from equivalence.workers.world import World, open_world

__all__ = [
    "MOST_WORKERS",
    "Case",
    "CaseFailed",
    "Deadlines",
    "Failure",
    "Outcome",
    "RankReport",
    "ReopeningWorld",
    "Worker",
    "World",
    "WorldNotOpened",
    "open_world",
    "preload",
    "reopening_world",
    "run_cases",
]
