"""TRL's best-fit-decreasing packing and its padding-free collator as a packing function.

`pack_dataset` sorts by length and cuts what is longer than a row; the collator makes one ragged row of what was packed together.
Needs trl, accelerate and peft: `packproof conformance --subject exec:"python trl_bfd.py"`.
`make conformance PEERS=trl` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

CONVENTIONS = {
    "shift": "model",
    "order": "sorted",
    "row_length": "ragged",
    "pad_label": "ignore",
}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call as SFTTrainer does under `packing=True`, and collate each row alone."""
    import datasets  # noqa: PLC0415 - seconds, and only where a row is built
    from trl import pack_dataset  # noqa: PLC0415
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: PLC0415

    datasets.disable_progress_bars()
    columns = {
        "input_ids": [each["tokens"] for each in conversations],
        "labels": [
            [token if trained else -100 for token, trained in zip(each["tokens"], each["trained"])]
            for each in conversations
        ],
    }
    packed = pack_dataset(datasets.Dataset.from_dict(columns), pack_length, "bfd")
    collator = DataCollatorForLanguageModeling(pad_token_id=pad_id, padding_free=True)
    rows = []
    for example in packed:
        batch = collator([example])
        row = {name: batch[name][0] for name in ("input_ids", "labels", "position_ids")}
        rows.append(dict(row, cu_seqlens=batch["cu_seq_lens_q"]))
    return rows


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="trl")
