"""axolotl's multipack sampler and collator as a packing function, in its sequential mode; the model shifts the labels.

Rows are padded to a multiple of 64, the default of axolotl. Conversations that are longer than a row, or hold fewer than two tokens, are dropped
by `filter_sequences_by_length`, which tells of it in the log.
Needs axolotl 0.21.0 with transformers, trl, accelerate, peft, addict, colorama and numba:
`packproof conformance --subject exec:"python axolotl_multipack.py"`.
`make conformance PEERS=axolotl` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

CONVENTIONS = {
    "shift": "model",
    "tail": "own",
    "pad_label": "ignore",
    "pad_positions": "restart",
    "overlong": "drop",
    "row_length": "multiple",
}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call in order. Context parallelism is the trainer's part, and not shown here."""
    from axolotl.utils.collators import V2BatchSamplerDataCollatorForSeq2Seq  # noqa: PLC0415 - seconds, and only where a row is built
    from axolotl.utils.samplers import MultipackBatchSampler  # noqa: PLC0415
    from axolotl.utils.trainer import add_position_ids, filter_sequences_by_length  # noqa: PLC0415
    from torch.utils.data import SequentialSampler  # noqa: PLC0415

    samples = [
        {
            "input_ids": each["tokens"],
            "labels": [token if trained else -100 for token, trained in zip(each["tokens"], each["trained"])],
            "attention_mask": [1] * len(each["tokens"]),
        }
        for each in conversations
    ]
    kept = [add_position_ids(each) for each in samples if filter_sequences_by_length(each, pack_length)]
    if not kept:
        return []
    sampler = MultipackBatchSampler(
        SequentialSampler(kept),
        batch_size=1,
        batch_max_len=pack_length,
        lengths=[each["length"] for each in kept],
        bin_size=len(kept),
        drop_last=False,
        sequential=True,
    )
    collator = V2BatchSamplerDataCollatorForSeq2Seq(_tokenizer(pad_id), pad_to_multiple_of=64)
    rows = []
    for batch in sampler.generate_batches():
        row = collator([[kept[number] for number in bin_] for bin_ in batch])
        rows.append({name: row[name][0] for name in ("input_ids", "labels", "position_ids")})
    return rows


def _tokenizer(pad_id):
    """Return a tokenizer of transformers that has a word for each id, for it is the tokenizer that pads."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({str(word): word for word in range(256)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=str(pad_id), padding_side="right")


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="axolotl")
