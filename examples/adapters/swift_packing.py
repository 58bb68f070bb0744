"""ms-swift's Megatron mode as a packing function: its sequential packing, `packing_row`, the collator, and what moves the labels.

Rows are padded for context parallelism, not to the pack length. What is longer than a row is dropped before packing.
Needs ms-swift 4.6.0, modelscope and megatron-core. Its package `mcore_bridge` needs Transformer Engine, and builds models only:
a stand-in takes its place. `packproof conformance --subject exec:"python swift_packing.py"`.
`make conformance PEERS=ms-swift` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

CONVENTIONS = {
    "pad_label": "ignore",
    "overlong": "drop",
    "row_length": "ragged",
}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Pack all conversations of the call in order; a row holds what fits into `pack_length`."""
    sys.modules.setdefault("mcore_bridge", mock.MagicMock(name="mcore_bridge"))
    from swift.dataset.packing import calculate_matched_group  # noqa: PLC0415 - seconds, and only where a row is built
    from swift.megatron.trainers.utils import get_batch_on_this_pp_rank  # noqa: PLC0415
    from swift.megatron.utils import get_packed_seq_params, get_padding_to  # noqa: PLC0415
    from swift.template import MaxLengthError, Template, TemplateMeta  # noqa: PLC0415

    class Tokenized(Template):
        """The template, with the step from messages to tokens replaced: the tokens are there already."""

        def _preprocess_inputs(self, inputs):
            pass

        _swift_prepare_inputs = _preprocess_inputs

        def _swift_encode(self, inputs):
            return [[token] for token in inputs.messages["tokens"]], list(map(float, inputs.messages["trained"])), 0

        def _simplify_context_list(self, context_list, loss_scale_list, inputs):  # noqa: ARG002 - the method of ms-swift
            return context_list, loss_scale_list

    plain = TemplateMeta("plain", [], ["{{QUERY}}"], [])
    template = Tokenized(
        None, plain, max_length=pack_length, truncation_strategy="raise", padding_free=True, is_binary_loss_scale=True
    )
    template.processor = SimpleNamespace(pad_token_id=pad_id)
    template.use_megatron, template.sequence_parallel_size = True, context_parallel_size
    template.set_mode("train")
    args = SimpleNamespace(
        task_type="causal_lm",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=context_parallel_size,
        sequence_parallel=False,
        fp8_recipe=None,
        attention_backend="flash",
        cp_partition_mode="zigzag",
    )
    samples = []
    for each in conversations:
        with contextlib.suppress(
            MaxLengthError
        ):  # `truncation_strategy: delete`, the default: the data set drops it and says so
            if each["tokens"]:
                samples.append(template._encode_truncated(SimpleNamespace(messages=each)))  # noqa: SLF001 - see above
    lengths = [(sample, template._get_megatron_cp_length(sample["length"])) for sample in samples]  # noqa: SLF001
    rows = []
    for group in calculate_matched_group(lengths, pack_length, strategy="sequential")[0]:
        batch = template.data_collator([sample for sample, _ in group], padding_to=get_padding_to(args))
        batch = get_batch_on_this_pp_rank(args, batch)
        boundaries = get_packed_seq_params(args, batch["position_ids"]).cu_seqlens_q
        rows.append(
            {**{name: batch[name] for name in ("input_ids", "labels", "position_ids")}, "cu_seqlens": boundaries}
        )
    return rows


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, semantics=["megatron-lm-0.19"], name="ms-swift")
