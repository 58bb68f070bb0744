"""nemo-automodel's `pack_dataset` and `packed_sequence_thd_collater` as a packing function.

The data sets of nemo-automodel hand over inputs without a conversation's last token and labels that are shifted already.
`pack_dataset` drops what is longer than a row, and tells of it once in the log.
Needs nemo-automodel 0.7.0 and datasets: `packproof conformance --subject exec:"python automodel_packed.py"`.
`make conformance PEERS=nemo-automodel` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

CONVENTIONS = {
    "last_token": "dropped",
    "pad_label": "ignore",
    "overlong": "drop",
}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call in order into rows of `pack_length`, each padded for context parallelism."""
    import datasets  # noqa: PLC0415 - seconds, and only where a row is built
    from nemo_automodel.components.datasets.llm.packed_sequence import pack_dataset  # noqa: PLC0415
    from nemo_automodel.components.datasets.utils import packed_sequence_thd_collater  # noqa: PLC0415

    datasets.disable_progress_bars()
    samples = [
        {
            "input_ids": each["tokens"][:-1],
            "labels": [token if trained else -100 for token, trained in zip(each["tokens"], each["trained"])][1:],
        }
        for each in conversations
    ]
    packed = pack_dataset(samples, "train", pack_length, padding_idx=pad_id, cp_size=context_parallel_size)
    rows = []
    for example in packed:
        batch = packed_sequence_thd_collater([example])
        row = {name: batch[name][0] for name in ("input_ids", "labels", "position_ids")}
        row["cu_seqlens"] = _boundaries(batch["seq_lens"][0])
        row["cu_seqlens_padded"] = _boundaries(batch["seq_lens_padded"][0])
        rows.append(row)
    return rows


def _boundaries(lengths):
    """Sum lengths up as nemo-automodel does before the model; -1000 fills a batch and is no length."""
    boundaries = [0]
    for length in lengths.tolist():
        if length >= 0:
            boundaries.append(boundaries[-1] + length)
    return boundaries


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="nemo-automodel")
