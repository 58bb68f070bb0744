"""Pack lengths with the packers of TRL and Axolotl, in an environment of their own: started by `packproof-bench packers`.

Run as `PYTHON packers_of_others.py NAME LENGTHS.npy CAPACITY`, where PYTHON has the packer's package. Prints one JSON object:
seconds of processor time, bins, and the lengths of the sequences that stand in them whole. It imports nothing of packproof.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import numpy as np


def trl(lengths: Any, capacity: int) -> tuple[float, int, Any]:
    """Return seconds, bins and the sequences' lengths of TRL's `pack_dataset`, best fit decreasing, over one batch of all."""
    pa, datasets = importlib.import_module("pyarrow"), importlib.import_module("datasets")
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), type=pa.int64())
    tokens = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(int(lengths.sum()), dtype=np.uint8)))
    table = datasets.Dataset(pa.table({"input_ids": tokens}))
    pack_dataset = importlib.import_module("trl").pack_dataset
    start = time.process_time()
    packed = pack_dataset(table, capacity, "bfd", {"batch_size": len(lengths), "keep_in_memory": True})
    seconds = time.process_time() - start
    found = packed.with_format("arrow")[:]["seq_lengths"].combine_chunks()
    return seconds, len(packed), np.asarray(found.flatten())


def axolotl(lengths: Any, capacity: int) -> tuple[float, int, Any]:
    """Return the same of Axolotl's `pack_parallel`, with the group and bin size of its defaults, in one process."""
    pack_parallel = importlib.import_module("axolotl.utils.samplers.multipack").pack_parallel
    pack_parallel(lengths[:1000], capacity, group_size=1000, bin_size=200, num_processes=1)  # compiles it
    start = time.process_time()
    bins = pack_parallel(lengths, capacity, group_size=100_000, bin_size=200, num_processes=1)
    seconds = time.process_time() - start
    return seconds, len(bins), lengths[np.concatenate([np.asarray(each) for each in bins])]


def main() -> None:
    """Pack the lengths on the command line and print what came of it."""
    name, path, capacity = sys.argv[1:]
    lengths = np.load(path)
    seconds, bins, found = {"trl": trl, "axolotl": axolotl}[name](lengths, int(capacity))
    kept = np.minimum(np.bincount(found, minlength=lengths.max() + 1), np.bincount(lengths, minlength=found.max() + 1))
    print(
        json.dumps(
            {"seconds": seconds, "bins": bins, "tokens": int(found.sum()), "lost": len(lengths) - int(kept.sum())}
        )
    )


if __name__ == "__main__":
    main()
