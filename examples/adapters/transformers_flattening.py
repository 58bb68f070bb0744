"""transformers' DataCollatorWithFlattening as a packing function: a batch becomes one ragged row, and the model shifts the labels.

Serve it from an environment with transformers and torch: `packproof conformance --subject exec:"python transformers_flattening.py"`.
"""

CONVENTIONS = {"shift": "model", "row_length": "ragged", "pad_label": "ignore"}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Collate all conversations of the call into one row. The collator knows neither a row's length nor context parallelism."""
    from transformers import DataCollatorWithFlattening  # noqa: PLC0415 - seconds, and only where a row is built

    del pack_length, pad_id, eos_id, context_parallel_size
    features = [{"input_ids": each["tokens"], "labels": _labels(each)} for each in conversations]
    batch = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(features)
    row = {name: batch[name][0] for name in ("input_ids", "labels", "position_ids")}
    return [{**row, "cu_seqlens": batch["cu_seq_lens_q"]}]


def _labels(conversation):
    return [token if trained else -100 for token, trained in zip(conversation["tokens"], conversation["trained"])]


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="transformers")
