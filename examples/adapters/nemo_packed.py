"""NeMo's packing strategy and `GPTSFTPackedDataset` as a packing function.

The first-fit-decreasing strategy sorts by length. NeMo pads with the end token, so that its end token is the pad id here. Its data set
expects conversations that are padded for context parallelism beforehand; what pads them is a script outside of the wheel, and not
shown. What is longer than a row ends `create_hist` with an IndexError.
Needs nemo-toolkit 2.7.3, the last version with this data set. The package's `__init__` modules import Lightning and Transformer Engine:
bare packages stand in for them, torch's `Dataset` for NeMo's, and one name each for a type and a folder that the class only mentions.
`packproof conformance --subject exec:"python nemo_packed.py"`.
`make conformance PEERS=nemo-toolkit` builds that environment, and examples/adapters/peers.toml says what pip installs.
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
    "overlong": "refuse",
}
BARE = [".core", ".lightning", ".collections", ".collections.common", ".collections.common.tokenizers"]
BARE += [".collections.llm", ".collections.llm.gpt", ".collections.llm.gpt.data"]


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call into rows of `pack_length`, as `prepare_packed_sequence_data` does, and collate each."""
    _stand_in("nemo", BARE)
    import numpy as np  # noqa: PLC0415 - seconds, and only where a row is built
    from nemo.collections.llm.gpt.data.core import GPTSFTPackedDataset  # noqa: PLC0415
    from nemo.utils import sequence_packing_utils as algorithms  # noqa: PLC0415

    samples = [{"input_ids": each["tokens"], "loss_mask": each["trained"]} for each in conversations]
    np.random.seed(0)  # noqa: NPY002 - NeMo draws from it
    sequences, histogram = algorithms.create_hist(samples, pack_length)
    assignments, _ = algorithms.create_packing_strategy(histogram, pack_length, "first_fit_decreasing")
    filled = algorithms.fill_packing_strategy(assignments, sequences, pack_length, pad_id)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.npy"
        np.save(file, filled)
        tokenizer = types.SimpleNamespace(eos_id=pad_id)
        dataset = GPTSFTPackedDataset(
            str(file), tokenizer, max_seq_length=pack_length, pad_to_max_length=True, prompt_template="{text}{answer}"
        )
        return [_row(dataset.collate_fn([dataset[number]])) for number in range(len(filled))]


def _row(batch):
    names = {"tokens": "input_ids", "labels": "labels", "loss_mask": "mask", "position_ids": "position_ids"}
    row = {ours: batch[theirs][0] for theirs, ours in names.items()}
    row["cu_seqlens"] = batch["cu_seqlens_unpadded"][0]
    row["cu_seqlens_padded"] = batch["cu_seqlens"][0]
    return row


def _stand_in(package, names):
    """Put bare packages in the place of those whose `__init__` imports more than can be had; their modules are the real ones."""
    import torch.utils.data  # noqa: PLC0415

    for name in [package + each for each in names]:
        if name not in sys.modules:
            parent, _, leaf = name.rpartition(".")
            sys.modules[name] = types.ModuleType(name)
            folders = [Path(folder) / leaf for folder in importlib.import_module(parent).__path__]
            sys.modules[name].__path__ = [str(folder) for folder in folders if folder.is_dir()]
    sys.modules["nemo.collections.common.tokenizers"].TokenizerSpec = object
    for name, attribute, value in (
        ("nemo.core.classes", "Dataset", torch.utils.data.Dataset),
        ("nemo.lightning.base", "NEMO_DATASETS_CACHE", "."),
    ):
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], attribute, value)


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="nemo-toolkit")
