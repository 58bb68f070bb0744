"""Megatron-Bridge's offline packing and `GPTSFTPackedDataset` as a packing function.

The first-fit-decreasing strategy of `megatron.bridge.data.packing` sorts by length; each conversation is padded for context parallelism.
Megatron-Bridge pads with the end token, so that its end token is the pad id here; longer conversations are skipped, with a warning at
cp 1 and truncated above.
Needs megatron-bridge 0.6.2 (Python 3.12) and megatron-core. The package's `__init__` modules import Transformer Engine for the models:
bare packages stand in for them. `packproof conformance --subject exec:"python bridge_packed.py"`.
`make conformance PEERS=megatron-bridge` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

import importlib
import sys
import tempfile
import types
from pathlib import Path

CONVENTIONS = {
    "last_token": "dropped",
    "order": "sorted",
    "tail": "own",
    "pad_positions": "zero",
    "overlong": "drop",
}
BARE = ["", ".data", ".data.datasets", ".training", ".training.tokenizers", ".training.utils", ".utils"]


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call into rows of `pack_length`, as `prepare_gpt_sft_packed_data` does, and collate each."""
    _stand_in("megatron.bridge", BARE)
    import numpy as np  # noqa: PLC0415 - seconds, and only where a row is built
    from megatron.bridge.data.packing import algorithms, offline  # noqa: PLC0415
    from megatron.bridge.data.packing.gpt_sft import GPTSFTPackedDataset  # noqa: PLC0415

    multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    samples = [{"input_ids": each["tokens"], "loss_mask": each["trained"]} for each in conversations]
    if multiple > 1:
        longest = pack_length // multiple * multiple
        for each in samples:
            padded = -(-max(len(each["input_ids"]) - 1, 0) // multiple) * multiple
            offline._pre_pad_data_point(each, pack_length, min(longest, padded) + 1, pad_id)  # noqa: SLF001
    np.random.seed(0)  # noqa: NPY002 - Megatron-Bridge draws from it
    sequences, histogram = algorithms.create_hist(samples, pack_length)
    assignments, _ = algorithms.create_packing_strategy(histogram, pack_length, "first_fit_decreasing")
    filled = algorithms.fill_packing_strategy(assignments, sequences, pack_length, pad_id)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.npy"
        np.save(file, filled)
        dataset = GPTSFTPackedDataset(
            str(file),
            types.SimpleNamespace(eos_id=pad_id, eod=pad_id),
            max_seq_length=pack_length,
            pad_to_max_length=True,
            prompt_template="{text}{answer}",
            pad_seq_to_mult=multiple,
        )
        return [_row(dataset.collate_fn([dataset[number]])) for number in range(len(filled))]


def _row(batch):
    names = {"tokens": "input_ids", "labels": "labels", "loss_mask": "mask", "position_ids": "position_ids"}
    row = {ours: batch[theirs][0] for theirs, ours in names.items()}
    row["cu_seqlens"] = batch["cu_seqlens_q"][0]
    if "cu_seqlens_q_padded" in batch:
        row["cu_seqlens_padded"] = batch["cu_seqlens_q_padded"][0]
    return row


def _stand_in(package, names):
    """Put bare packages in the place of those whose `__init__` imports more than can be had; their modules are the real ones."""
    for name in [package + each for each in names]:
        if name not in sys.modules:
            parent, _, leaf = name.rpartition(".")
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [
                str(Path(folder) / leaf)
                for folder in importlib.import_module(parent).__path__
                if (Path(folder) / leaf).is_dir()
            ]


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="megatron-bridge")
