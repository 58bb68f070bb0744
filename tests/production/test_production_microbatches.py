"""R-ONLINE and R-MEET in production: the padded batch, the squeeze, chat tokens, and one microbatch of either path."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import process_mtp_loss

from equivalence.generators import tokenizers
from production.errors import BatchRefused, PackproofError, RowRefused
from production.online import bins as squeeze
from production.online import chat, padded_batch
from production.parallel.context_parallel import shard_index
from production.parallel.microbatches import Microbatch, MicrobatchSettings, process_microbatch
from production.parallel.multi_token_feed import MultiTokenParams, rolls_from_tables
from production.rows import batch as batches
from production.training.data.dataset import ConversationBatch
from production.training.data.online_bins import BinSettings, pack_bins

CONVERSATIONS = [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([6, 7, 8], [0, 1, 1]), ([9, 10], [1, 1])]
FOUR = squeeze.Padding(sequence_multiple=4)
JOB = {
    "make_sequence_length_divisible_by": 8,
    "context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_parallel_size": 1,
    "precision": "unquantized",
    "hybrid_expert_parallel": False,
    "longest_bin": 20,
}


def conversations():
    return [
        padded_batch.Conversation(token_ids=torch.tensor(ids), token_mask=torch.tensor(mask, dtype=torch.float32))
        for ids, mask in CONVERSATIONS
    ]


def sequences(multiple=4):
    return padded_batch.build_padded_batch(conversations(), make_sequence_length_divisible_by=multiple)


def online(rank, size=2, **options):
    given = MicrobatchSettings(context_parallel_rank=rank, context_parallel_size=size, padding=FOUR, **options)
    return process_microbatch(sequences(), given)


def rows(count=1, cp=2):
    return batches.collate(
        [
            {
                "input_ids": torch.arange(8) + 10 * number,
                "target_ids": torch.arange(8) + 10 * number + 1,
                "token_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1]),
                "position_ids": torch.tensor([0, 1, 2, 3] * 2),
                "cu_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32),
                "max_seqlen": 4,
                "context_parallel_size": cp,
            }
            for number in range(count)
        ]
    )


def direct(rank, size=2, count=1, **options):
    return process_microbatch(
        rows(count), MicrobatchSettings(context_parallel_rank=rank, context_parallel_size=size, **options)
    )


def test_r_online_4_the_published_example():
    assert online(0).input_ids.tolist() == [[1, 2, 0, 0, 6, 0, 9, 0]]
    assert online(1).input_ids.tolist() == [[3, 4, 5, 0, 7, 8, 10, 0]]
    found = online(0)
    assert found.packed_seq_params.cu_seqlens_q.tolist() == [0, 8, 12, 16]
    assert found.row.cu_seqlens.tolist() == [0, 5, 8, 10]
    assert found.row.target_ids.tolist() == [[2, 3, 4, 5, 0, 0, 0, 1, 7, 8, 0, 6, 10, 0, 0, 9]]
    assert found.row.target_mask.tolist() == [[0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]]
    assert found.target_mask.tolist() == [[0, 1, 0, 0, 1, 0, 1, 0]]


def test_r_online_4_values_behind_a_sequence_are_not_read():
    poisoned = sequences()
    behind = torch.arange(8) >= poisoned.input_lengths[:, None]
    poisoned.input_ids[behind], poisoned.token_mask[behind] = 999, torch.nan
    found, clean = squeeze.squeeze(poisoned, FOUR), squeeze.squeeze(sequences(), FOUR)
    for field in dataclasses.fields(found):
        if field.name != "max_seqlen":
            assert torch.equal(getattr(found, field.name), getattr(clean, field.name)), field.name


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1),
        ({"precision": "fp8_blockwise"}, 128),
        ({"precision": "fp8_mxfp8"}, 32),
        ({"precision": "fp8_other"}, 16),
        ({"precision": "fp8_mxfp8", "hybrid_expert_parallel": True}, 128),
        ({"precision": "fp8_other", "context_parallel_size": 2, "tensor_parallel_size": 2}, 64),
        (
            {
                "precision": "fp8_other",
                "context_parallel_size": 2,
                "tensor_parallel_size": 2,
                "sequence_parallel": True,
            },
            128,
        ),
    ],
)
def test_r_online_5_the_length_to_which_a_whole_row_is_padded(options, factor):
    found = squeeze.choose_padding(**JOB | options)
    assert found == squeeze.Padding(sequence_multiple=8, row_multiple=factor, row_length=None)
    staged = squeeze.choose_padding(**JOB | options | {"pipeline_parallel_size": 2})
    assert staged.row_length == padded_batch.round_up(20, factor)


def test_r_online_5_the_last_sequence_takes_the_rows_padding():
    for options, end in (({"row_length": 24}, 24), ({"row_multiple": 10}, 20), ({}, 16)):
        row = squeeze.squeeze(sequences(), squeeze.Padding(sequence_multiple=4, **options))
        assert row.cu_seqlens_padded.tolist() == [0, 8, 12, end]
        assert row.input_ids.shape == (1, end)
        assert row.max_seqlen == max(8, end - 12)


def test_r_online_5_each_data_parallel_rank_has_the_row_length_of_its_own_longest_bin():
    """NeMo-RL's own code: lengths 4 and 2 over dp 2 with two stages give rows of 4 and of 2."""
    given = {
        **{name: value for name, value in JOB.items() if name not in ("longest_bin", "sequence_parallel")},
        "make_sequence_length_divisible_by": 1,
        "pipeline_parallel_size": 2,
    }
    settings = BinSettings(**given, capacity=4, algorithm="concatenative", seed=None, data_parallel_size=2)
    made = [
        padded_batch.Conversation(token_ids=torch.arange(length), token_mask=torch.ones(length)) for length in (4, 2)
    ]
    batch = ConversationBatch(conversations=tuple(made), sample_mask=torch.ones(2))
    lengths = []
    for rank in range(2):
        own = pack_bins(batch, settings, data_rank=rank)
        lengths.append([squeeze.squeeze(each, own.padding).input_ids.shape[1] for each in own.padded_batches])
    assert lengths == [[4], [2]]


def test_batches_that_cannot_be_padded_are_refused():
    for options in ({"sequence_multiple": 0}, {"row_length": 10, "row_multiple": 4}, {"row_length": 0}):
        with pytest.raises(PackproofError, match="To fix it"):
            squeeze.Padding(**options)
    with pytest.raises(PackproofError, match="must be at least the 16 tokens of the bin with its padding, got 12"):
        squeeze.squeeze(sequences(), squeeze.Padding(sequence_multiple=4, row_length=12))
    with pytest.raises(PackproofError, match=r"must be a multiple of 4 \(2·cp"):
        squeeze.choose_padding(**JOB | {"make_sequence_length_divisible_by": 6, "context_parallel_size": 2})
    with pytest.raises(PackproofError, match=r"must be one of .*, got 'fp4'"):
        squeeze.choose_padding(**JOB | {"precision": "fp4"})
    with pytest.raises(BatchRefused) as refused:
        process_microbatch(sequences(), MicrobatchSettings(context_parallel_size=2))
    assert refused.value.kind == "indivisible_segment"


def test_r_online_2_3_and_6_the_padded_batch_its_bins_and_its_divisor():
    whole = sequences()
    assert whole.input_ids.shape == (3, 8)
    assert not hasattr(whole, "packed_cu_seqlens")
    given = {"algorithm": "concatenative", "make_sequence_length_divisible_by": 4}
    bins = padded_batch.fill_bins(whole, 8, data_parallel_size=1, **given)
    assert bins == [[0], [1, 2]]
    assert padded_batch.longest_bin(whole, bins, make_sequence_length_divisible_by=4) == 8
    assert padded_batch.fill_bins(whole, 8, data_parallel_size=3, **given) == [[0], [1], [2]]
    assert padded_batch.take_sequences(whole, [2, 0]).input_lengths.tolist() == [2, 5]
    assert float(whole.valid_tokens()) == 6
    filled = padded_batch.build_padded_batch(conversations(), make_sequence_length_divisible_by=4, pad_token_id=77)
    assert filled.input_ids[1].tolist() == [6, 7, 8, 77, 77, 77, 77, 77]
    assert squeeze.squeeze(filled, FOUR).input_ids[0, 8:12].tolist() == [6, 7, 8, 0]
    whole.sample_mask[0] = 0
    assert float(whole.valid_tokens()) == 3
    with pytest.raises(PackproofError, match="sequence 0"):
        padded_batch.fill_bins(whole, 7, data_parallel_size=1, **given)
    for bad in ([], [padded_batch.Conversation(token_ids=torch.empty(0), token_mask=torch.empty(0))]):
        with pytest.raises(PackproofError, match="must have a token"):
            padded_batch.build_padded_batch(bad, make_sequence_length_divisible_by=1)
    for fault in (lambda: sequences(0), lambda: padded_batch.take_sequences(whole, [])):
        with pytest.raises(PackproofError, match="To fix it"):
            fault()


def test_r_meet_1_stored_boundaries_are_reused():
    found = direct(1)
    assert found.input_ids.tolist() == [[1, 2, 5, 6]]
    assert found.labels.tolist() == found.target_ids.tolist() == [[2, 3, 6, 7]]
    assert found.loss_mask.tolist() == found.target_mask.tolist() == [[1, 0, 1, 0]]
    assert found.position_ids.tolist() == [[1, 2, 1, 2]]
    params = found.packed_seq_params
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 4, 4)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name).tolist() == [0, 4, 8]
    assert found.row is None


def test_r_meet_1_several_rows_are_one_sequence_and_a_filling_row_counts_nowhere():
    batch = batches.pad_validation(rows(3), size=2)
    settings = MicrobatchSettings(context_parallel_size=2, depths=1)
    found = process_microbatch(batch, settings)
    assert found.input_ids.shape == (1, 16)
    assert found.packed_seq_params.cu_seqlens_q.tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert found.target_mask[0, 12:].tolist() == [0] * 4
    tables = found.packed_seq_params.feed.tables
    assert tables.token_mask.shape == (2, 1, 16)
    assert not tables.token_mask[:, 0, 12:].any()
    assert float(tables.row_counts[0]) == 3 * 6
    assert batch.token_mask[3].tolist() == rows().token_mask[0].tolist()  # the batch itself is left alone


@pytest.mark.parametrize("weights", ["rank", "rows"])
def test_r_meet_1_the_direct_path_feeds_multi_token_prediction_from_tables(weights):
    found = direct(0, depths=2, weights=weights, verify=True)
    params = found.packed_seq_params
    assert isinstance(params, MultiTokenParams)
    assert params.feed.tables.depths == 2
    assert params.total_tokens == 4
    assert torch.equal(found.target_mask, params.feed.tables.token_mask[0])
    assert found.input_ids.data_ptr() == params.feed.tables.input_ids[0].data_ptr()
    shown = [[1, 1, 1, 1]] if weights == "rank" else [[3, 0, 0, 0]]  # half of the row's six
    assert found.loss_mask.tolist() == shown
    assert found.target_mask.tolist() == [[1, 1, 1, 1]]
    plain = direct(0, depths=2, mtp="upstream_roll")
    assert type(plain.packed_seq_params) is PackedSeqParams
    assert plain.loss_mask.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("mtp", ["tables", "upstream_roll"])
def test_r_online_7_the_model_gets_the_tokens_mask_only_for_multi_token_prediction(mtp):
    assert (online(0).labels, online(0).loss_mask, online(0).position_ids) == (None, None, None)
    deep = online(0, depths=1, mtp=mtp)
    assert deep.labels is None
    assert deep.input_ids.tolist() == [[1, 2, 0, 0, 6, 0, 9, 0]]
    assert deep.loss_mask.tolist() == [[0, 0, 0, 0, 0, 0, 1, 0]]
    assert deep.position_ids is None
    assert deep.packed_seq_params.total_tokens == deep.total_tokens == 8
    assert deep.packed_seq_params.seq_idx.tolist() == online(0).packed_seq_params.seq_idx.tolist()


def test_r_online_7_depths_are_those_of_the_ids_within_padded_sequences():
    tables = online(0, size=1, depths=2, verify=True).packed_seq_params.feed.tables
    assert tables.target_ids[:, 0].tolist() == [
        [2, 3, 4, 5, 0, 0, 0, 0, 7, 8, 0, 0, 10, 0, 0, 0],  # 0 where the loss outside has a sequence's first id
        [3, 4, 5, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0],
        [4, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert tables.token_mask[:, 0].tolist() == [
        [0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert tables.position_ids is None
    assert tables.own_mask[0].tolist() == [[0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0]]
    assert tables.row_counts.tolist() == [6, 4, 2]
    shares = [online(rank, depths=2).packed_seq_params.feed.tables for rank in range(2)]
    assert [each.rank_counts.tolist() for each in shares] == [[3, 3, 2], [3, 1, 0]]
    assert all(each.row_counts.tolist() == [6, 4, 2] for each in shares)
    assert shares[1].target_ids[1].tolist() == [[5, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("mtp", ["tables", "upstream_roll"])
def test_r_online_7_megatron_core_derives_labels_and_masks_from_what_it_is_given(mtp):
    """Its own `process_mtp_loss` without labels: at depth 1 the target is two tokens on, and its mask decides."""
    found = online(0, size=1, depths=1, mtp=mtp, verify=True, stage="loss")
    with rolls_from_tables():
        shown, gradient = derived(found)
    assert shown[0].tolist() == [[3, 4, 5, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]]
    # β/D · n₀/n₁ with n₀ 6, the divisor's count (R-ONLINE-6), and n₁ 4: targets 3 4 5 and 8.
    expected = torch.zeros(16).index_fill_(0, torch.tensor([0, 1, 2, 8]), 0.5 * 6 / 4)
    assert gradient.tolist() == expected.tolist()


@pytest.mark.parametrize("per_token", [True, False])
def test_r_mtp_3_weights_by_rows_do_not_depend_on_cp_online(per_token):
    cuts = [shard_index(online(0).packed_seq_params.cu_seqlens_q, rank, 2) for rank in range(2)]
    whole = torch.zeros(16)
    with rolls_from_tables():
        for rank, index in enumerate(cuts):
            found = online(rank, depths=2, weights="rows", verify=True, stage="loss")
            assert found.loss_mask.tolist() == online(rank, depths=2).loss_mask.tolist(), "the tokens' own mask"
            _, whole[index] = derived(found, size=2, per_token=per_token)
        _, alone = derived(online(0, size=1, depths=2, stage="loss"), per_token=per_token)
    # Where losses are means, DDP averages over cp.
    torch.testing.assert_close(whole if per_token else whole / 2, alone, rtol=1e-6, atol=0)


def test_tables_of_the_online_path_refuse_labels_and_another_mask():
    found = online(0, size=1, depths=1, stage="loss")
    with rolls_from_tables(), pytest.raises(PackproofError, match="values that are not input_ids at depth 0"):
        derived(online(0, size=1, depths=1, verify=True, stage="loss"), input_ids=found.target_ids)
    refused = "the roll of token_mask from depth 0 came where token_mask at depth 0"
    with pytest.raises(PackproofError, match=refused), rolls_from_tables():
        derived(found, loss_mask=found.packed_seq_params.feed.tables.token_mask[0])
    fresh = online(0, size=1, depths=1, stage="loss")
    with (
        pytest.raises(PackproofError, match="the end of the pass came where target_ids at depth 1"),
        rolls_from_tables(),
    ):
        derived(fresh, labels=fresh.target_ids)


def derived(found, size=1, *, per_token=True, **given):
    """What megatron-core's own multi-token loss labels its first depth with, and the sum over depths of each token's weight."""
    depths, count = (
        found.packed_seq_params.feed.tables.depths if hasattr(found.packed_seq_params, "feed") else 1,
        16 // size,
    )
    shown = []
    hidden = torch.ones((depths + 1) * count, 1, 1, requires_grad=True)

    def token_losses(labels, states):
        shown.append(labels)
        return states[:, :, 0].transpose(0, 1)

    main = process_mtp_loss(
        hidden_states=hidden,
        **{"labels": found.labels, "loss_mask": found.loss_mask, "input_ids": found.input_ids} | given,
        output_layer=lambda states, **_: (states, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=token_losses,
        config=SimpleNamespace(
            mtp_num_layers=depths,
            mtp_loss_scaling_factor=0.5,
            mtp_detach_heads=False,
            calculate_per_token_loss=per_token,
        ),
        cp_group=SimpleNamespace(size=lambda: size),
        packed_seq_params=found.packed_seq_params,
    )
    main.sum().backward()
    return shown, hidden.grad[count:, 0, 0].view(depths, count).sum(dim=0)


def test_r_meet_2_total_tokens_are_those_of_the_share_on_both_paths():
    found, made = direct(0), online(0)
    assert (found.total_tokens, found.packed_seq_params.total_tokens) == (4, 4)
    assert (made.total_tokens, made.packed_seq_params.total_tokens) == (8, 8)
    assert found.packed_seq_params.seq_idx.tolist() == [[0] * 4 + [1] * 4]
    assert made.packed_seq_params.seq_idx.tolist() == [[0] * 8 + [1] * 4 + [2] * 4]


def test_everything_moves_to_the_device_once_and_nothing_is_read_there():
    """On `meta` every read of a value is an error."""
    made = [
        process_microbatch(batch, MicrobatchSettings(context_parallel_size=2, padding=FOUR, **options), device="meta")
        for batch, options in (
            (rows(), {}),
            (rows(), {"depths": 2, "weights": "rows"}),
            (rows(), {"depths": 2, "mtp": "upstream_roll"}),
            (sequences(), {}),
            (sequences(), {"depths": 1, "mtp": "upstream_roll"}),
            (sequences(), {"depths": 2, "weights": "rows"}),
        )
    ]
    for found in made:
        assert all(tensor.device.type == "meta" for tensor in tensors_of(found))
        assert len(list(tensors_of(found))) >= 8
        assert found.row is None or found.row.cu_seqlens_padded.device.type == "cpu"  # what the loss gathers with


def tensors_of(found: Microbatch):
    params = found.packed_seq_params
    row = [] if found.row is None else [found.row.input_ids, found.row.target_ids, found.row.target_mask]
    tables = []
    if isinstance(params, MultiTokenParams):
        named = params.feed.tables
        tables = [getattr(named, field.name) for field in dataclasses.fields(named)]
    own = [getattr(found, field.name) for field in dataclasses.fields(found)]
    given = [getattr(params, field.name) for field in dataclasses.fields(params)]
    return (each for each in (*own, *given, *row, *tables) if isinstance(each, torch.Tensor))


def test_faults_are_found_on_the_host_before_any_copy():
    batch = rows()
    for fault, kind in (
        ({"packed_cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32)}, "indivisible_segment"),
        ({"packed_cu_seqlens": torch.tensor([[0, 4, 4]], dtype=torch.int32)}, "cu_end"),
        ({"packed_cu_seqlens": torch.tensor([[4, 4, 8]], dtype=torch.int32)}, "cu_start"),
        ({"packed_cu_seqlens": torch.tensor([[0, 9, 8]], dtype=torch.int32)}, "cu_order"),
        ({"input_ids": batch.input_ids.to("meta")}, "field_shape"),
    ):
        with pytest.raises(BatchRefused) as refused:
            process_microbatch(
                dataclasses.replace(batch, **fault), MicrobatchSettings(context_parallel_size=2), device="meta"
            )
        assert refused.value.kind == kind
    torn = dataclasses.replace(batch, packed_cu_seqlens=torch.tensor([[0, 4, 7]], dtype=torch.int32))
    with pytest.raises(BatchRefused, match="must end at 8, the number of tokens, got 7"):  # also where nothing is cut
        process_microbatch(torn, MicrobatchSettings())
    for options in ({"depths": -1}, {"depths": 1, "weights": "rows", "mtp": "upstream_roll"}, {"layout": "spiral"}):
        with pytest.raises(PackproofError, match="To fix it"):
            MicrobatchSettings(**options)


def test_r_cp_4_contiguous_cuts_each_row():
    found = process_microbatch(
        rows(2), MicrobatchSettings(context_parallel_rank=1, context_parallel_size=2, layout="contiguous", depths=1)
    )
    assert found.input_ids.tolist() == [[4, 5, 6, 7, 14, 15, 16, 17]]


MESSAGES = [
    {"role": "system", "content": "w0 "},
    {"role": "user", "content": "w1 "},
    {"role": "assistant", "content": "w2 w3"},
]


def test_r_online_1_chat_tokens_and_the_mask_of_each_message():
    tokenizer = tokenizers.load("word")

    def tokenize(prompt_format, messages=MESSAGES, **options):
        (found,) = maker_of(tokenizer, prompt_format=prompt_format, **options).tokenize([messages])
        return found.token_ids.tolist(), found.token_mask.tolist()

    assert tokenize("identity") == ([12, 13, 14, 15], [0, 0, 1, 1])
    assert tokenize("identity", add_bos=True, add_eos=True) == ([1, 12, 13, 14, 15, 2], [0, 0, 0, 1, 1, 1])
    assert tokenize("default") == tokenize("identity")
    ids, mask = tokenize("nemotron-nano-v2")
    # The assistant's header trains here; the direct path masks its three tokens.
    assert [id_ for id_, trained in zip(ids, mask, strict=True) if trained] == [5, 11, 10, 14, 15, 10, 6, 10]
    other = [MESSAGES[1], {"role": "Assistant", "content": "w2"}]
    assert tokenize("identity", other) == ([13, 14], [0, 0])
    assert tokenize("identity", []) == ([], [])


def test_r_online_1_a_conversation_that_cannot_be_tokenized_is_refused():
    maker = maker_of(tokenizers.load("word"), prompt_format="identity")
    with pytest.raises(RowRefused) as refused:
        maker.tokenize([MESSAGES, [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "\ud800"}]])
    assert (refused.value.kind, refused.value.conversation, refused.value.turn) == ("bad_text", 1, 1)
    with pytest.raises(RowRefused) as refused:
        maker.tokenize([["no message"]])
    assert refused.value.kind == "bad_message"
    with pytest.raises(PackproofError, match="the nearest is 'identity'"):
        chat.ChatSettings(prompt_format="identiy")
    with pytest.raises(PackproofError, match="no generation prompt to add"):
        chat.ChatSettings(prompt_format="identity", add_generation_prompt=True)
    with pytest.raises(PackproofError, match="max_length"):
        chat.ChatSettings(max_length=0)


def maker_of(tokenizer, **settings):
    return chat.ChatTokenizer(
        tokenizer=tokenizer, settings=chat.ChatSettings(**{"add_bos": False, "add_eos": False} | settings)
    )


@pytest.fixture
def templated():
    """The word tokenizer with a template of the test's own, put back afterwards."""
    tokenizer = tokenizers.load("word")
    kept = tokenizer.chat_template, tokenizer.bos_token
    yield tokenizer
    tokenizer.chat_template, tokenizer.bos_token = kept


def test_r_online_1_bos_and_eos_are_on_by_default_and_a_tokenizer_without_one_adds_nothing(templated):
    assert (chat.ChatSettings().add_bos, chat.ChatSettings().add_eos) == (True, True)
    asking = chat.ChatTokenizer(tokenizer=templated, settings=chat.ChatSettings(prompt_format="identity"))
    assert asking.missing_tokens == []
    templated.bos_token = None
    asking = chat.ChatTokenizer(tokenizer=templated, settings=chat.ChatSettings(prompt_format="identity"))
    assert asking.missing_tokens == ["add_bos"]
    assert asking.tokenize([MESSAGES])[0].token_ids.tolist() == [12, 13, 14, 15, 2]


def test_r_online_8_a_conversation_that_is_too_long_is_cut_as_nemo_rl_cuts_it():
    word = tokenizers.load("word")
    messages = [{"role": "user", "content": "w1 w2 w3 w4 w5 "}, {"role": "assistant", "content": "w6 w7 w8"}]
    (whole,) = maker_of(word, prompt_format="identity", max_length=9).tokenize([messages])
    assert (len(whole.token_ids), whole.weight) == (8, 1.0)
    for longest, kept, trained in ((8, [0, 1, 2, 3, 5, 6, 7], 3), (5, [0, 1, 5, 6], 2)):
        (stub,) = maker_of(word, prompt_format="identity", max_length=longest).tokenize([messages])
        assert stub.token_ids.tolist() == whole.token_ids[kept].tolist()
        assert (int(stub.token_mask.sum()), stub.weight) == (trained, 0.0)
    with pytest.raises(RowRefused, match="a conversation must have fewer than 8 tokens, got 8") as refused:
        maker_of(word, prompt_format="identity", max_length=8, on_long_conversation="refuse").tokenize([messages])
    assert refused.value.kind == "truncated"
    batch = ConversationBatch(conversations=(whole, stub), sample_mask=torch.ones(2))
    settings = {name: value for name, value in JOB.items() if name not in ("longest_bin", "sequence_parallel")}
    settings |= {"capacity": 16, "algorithm": "concatenative", "seed": None, "data_parallel_size": 1}
    own = pack_bins(batch, BinSettings(**settings), data_rank=0)
    (row,) = [squeeze.squeeze(each, own.padding) for each in own.padded_batches]
    assert row.target_mask.sum(dim=1).tolist() == [3.0]  # the whole one's alone
    assert (own.counts.masked_out_conversations, own.counts.trained_tokens) == (1, 3)


COUNTING = "{% for m in messages %}{{ messages|length }} {{ m.content }} {% endfor %}"
FORGETTING = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('w9 ')[-1] }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(("template", "turn"), [(COUNTING, 1), (FORGETTING, 2)])
def test_r_online_9_a_template_that_renders_earlier_messages_differently_is_refused(templated, template, turn):
    templated.chat_template = template
    messages = [
        {"role": "user", "content": "w1 "},
        {"role": "assistant", "content": "w2 w9 w3 "},
        {"role": "user", "content": "w4 "},
    ]
    with pytest.raises(RowRefused, match="no longer renders what it rendered before") as refused:
        maker_of(templated).tokenize([messages])
    assert (refused.value.kind, refused.value.turn) == ("unjoined_pieces", turn)
    assert maker_of(templated, on_unjoined_pieces="allow").tokenize([messages])[0].token_ids.numel() > 5


def test_r_online_9_messages_that_merge_into_other_ids_are_refused_with_the_first_id_that_differs():
    maker = maker_of(tokenizers.load("word"), prompt_format="identity")
    maker.check_ids(chat.Chat(messages=MESSAGES))
    merging = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "2"}]  # "w12" is one word
    with pytest.raises(RowRefused, match="the first that differs is token 0") as refused:
        maker.check_ids(chat.Chat(messages=merging))
    assert (refused.value.kind, refused.value.turn) == ("unjoined_pieces", 0)
    maker_of(tokenizers.load("word"), prompt_format="identity", on_unjoined_pieces="allow").check_ids(
        chat.Chat(messages=merging)
    )


TOOLS = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.content }} {% for c in m.tool_calls %}{{ c.name }} {% endfor %}{% endfor %}"


def test_r_online_10_tools_and_their_calls_reach_the_template_or_are_refused(templated):
    templated.chat_template = TOOLS
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "w5"}]},
    ]
    line = chat.Chat(messages=messages, tools=[{"name": "w4"}])
    (found,) = maker_of(templated).tokenize([line])
    words = [templated.convert_ids_to_tokens(int(token)) for token in found.token_ids]
    assert [word for word in words if word.startswith("w")] == ["w4", "w1", "w5"]
    templated.chat_template = TOOLS.replace("m.tool_calls", "[]")
    with pytest.raises(RowRefused, match="nothing of its tool calls"):
        maker_of(templated).tokenize([line])
    templated.chat_template = TOOLS.replace("tools or []", "[]")
    with pytest.raises(RowRefused, match="does not render the conversation's tools") as refused:
        maker_of(templated).tokenize([line])
    assert "tool_key null" in refused.value.fix
    with pytest.raises(RowRefused, match="identity renders no tools, and the line has tool calls"):
        maker_of(templated, prompt_format="identity").tokenize([messages])
