"""LLaMA-Factory's `PackedSupervisedDatasetProcessor` with `neat_packing` as a packing function; the model shifts the labels.

The processor sorts by length, fills rows of one position more than `cutoff_len`, and drops what is longer, with a warning in the log.
Its step from messages to tokens is overridden, since the tokens are there already.
Needs llamafactory 0.9.5 with transformers, trl, accelerate, peft, datasets 4.0.0 and torchaudio, and `DISABLE_VERSION_CHECK=1`, which
the adapter sets: `packproof conformance --subject exec:"python llamafactory_packed.py"`.
`make conformance PEERS=llamafactory` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

import os
from types import SimpleNamespace

CONVENTIONS = {
    "shift": "model",
    "order": "sorted",
    "tail": "own",
    "pad_label": "ignore",
    "pad_positions": "zero",
    "overlong": "drop",
    "row_length": "P+1",
}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call into rows of `pack_length` + 1 positions; context parallelism is not known here."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from llamafactory.data.processor.supervised import PackedSupervisedDatasetProcessor  # noqa: PLC0415 - seconds, and only where a row is built

    class Tokenized(PackedSupervisedDatasetProcessor):
        """The processor, with conversations in the place of its prompts."""

        def _encode_data_example(self, prompt, **_):
            each = prompt[0]
            return each["tokens"], [t if trained else -100 for t, trained in zip(each["tokens"], each["trained"])]

    processor = Tokenized(
        template=None,
        tokenizer=SimpleNamespace(pad_token_id=pad_id),
        processor=None,
        data_args=SimpleNamespace(cutoff_len=pack_length, neat_packing=True),
    )
    nothing = [None] * len(conversations)
    columns = dict.fromkeys(("_system", "_tools", "_images", "_videos", "_audios"), nothing)
    columns.update(_prompt=[[each] for each in conversations], _response=[[each] for each in conversations])
    packed = processor.preprocess_dataset(columns)
    return [
        {
            "input_ids": packed["input_ids"][row],
            "labels": packed["labels"][row],
            "position_ids": packed["position_ids"][row],
            "cu_seqlens": packed["packing_params"][row]["sequence_boundaries"],
        }
        for row in range(len(packed["input_ids"]))
    ]


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="llamafactory")
