"""torchtune's PackedDataset as a packing function; the recipes shift the labels of the whole row.

Needs torchtune with an old torchao: `packproof conformance --subject exec:"python torchtune_packed.py"`.
`make conformance PEERS=torchtune` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

CONVENTIONS = {
    "shift": "model",
    "tail": "own",
    "pad_label": "ignore",
    "overlong": "refuse",
}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call in order into rows of `pack_length`; padding is a segment of its own."""
    from torchtune.datasets import PackedDataset  # noqa: PLC0415 - seconds, and only where a row is built

    samples = [
        {
            "tokens": list(each["tokens"]),
            "labels": [token if trained else -100 for token, trained in zip(each["tokens"], each["trained"])],
        }
        for each in conversations
    ]
    rows = []
    for row in PackedDataset(samples, max_seq_len=pack_length, padding_idx=pad_id).packs:
        boundaries = [0]
        for length in row["seq_lens"].tolist():
            boundaries.append(boundaries[-1] + length)
        rows.append(
            {
                "input_ids": row["tokens"],
                "labels": row["labels"],
                "position_ids": row["input_pos"],
                "cu_seqlens": boundaries,
            }
        )
    return rows


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="torchtune")
