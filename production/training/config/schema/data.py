"""Declare the data of a job: files, settings of their rows, and the order of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PACKED = "megatron_sft_packed"
"""`dataset_name` of rows that were packed ahead of time: the direct path."""
CHAT = "openai_format"
"""`dataset_name` of ordinary chat JSONL, one conversation a line: the online path."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a dataset."""

    path: str
    """Path of the JSON-lines file, plain, `.gz` or `.zst`; relative to where the job is started."""
    weight: float | None = None
    """Share of this file's rows in a blend, > 0; no file with one: the files are read end to end."""


@dataclass(frozen=True, kw_only=True)
class DatasetDefaults:
    """Section `data.default`: defaults of the datasets. The fields are those of `Dataset`."""

    dataset_name: Literal["megatron_sft_packed", "openai_format"] | None = None
    """Kind of dataset; None: each dataset must say."""
    chat_key: str = "messages"
    """Key of a line that holds the list of messages."""
    tool_key: str | None = "tools"
    """Online: key of a line that holds the tools its chat template is given; None: the line's tools are left out."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of an unreadable line: stop the job, or leave the line out, count and list it (SPEC R-FILE-8)."""
    semantics: str = "megatron-lm-0.19"
    """Preset of docs/SPEC.md#presets, optionally with overrides: `strict,lost_conversations=refuse`."""
    megatron_sft_prompt_format: Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"] | None = None
    """Prompt format of docs/SPEC.md#prompts; required for packed rows."""
    megatron_sft_pad_token: str | None = None
    """Pad token; None: the format's."""
    megatron_sft_assistant_prefix_len: int | None = None
    """Tokens of an assistant turn that are not trained; None: the format's."""
    megatron_sft_context_parallel_size: int | None = None
    """Context parallel size that rows are laid out for; None: derived, `policy.megatron_cfg.context_parallel_size`. Must equal it."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages that say what to train (`weight`, `loss`, …) or hold text that is not rendered (`reasoning_content`, …) and are passed over
    all the same; rows with others are refused (SPEC R-KEYS-1)."""
    allow_format_misfit: bool = False
    """Whether to train although the tokenizer lacks the prompt format's markers, which are then text (SPEC R-FIT-1)."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One entry of `data.train` or `data.validation`, with `data.default` already filled in."""

    dataset_name: Literal["megatron_sft_packed", "openai_format"]
    """`megatron_sft_packed`: rows packed ahead of time, direct path. `openai_format`: one conversation a line, online path."""
    data_path: tuple[DataFile, ...]
    """In YAML a path, a list of paths, or a list of `{path, weight}`."""
    chat_key: str = "messages"
    """Key of a line that holds the list of messages."""
    tool_key: str | None = "tools"
    """Online: key of a line that holds the tools its chat template is given; None: the line's tools are left out."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of an unreadable line (SPEC R-FILE-8)."""
    semantics: str = "megatron-lm-0.19"
    """Preset of docs/SPEC.md#presets, optionally with overrides."""
    megatron_sft_prompt_format: Literal["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"] | None = None
    """Prompt format of docs/SPEC.md#prompts; None only where the dataset is not packed (then the tokenizer's chat template)."""
    megatron_sft_pad_token: str | None = None
    """Pad token; None: the format's."""
    megatron_sft_assistant_prefix_len: int | None = None
    """Tokens of an assistant turn that are not trained; None: the format's."""
    megatron_sft_context_parallel_size: int = 1
    """Context parallel size that rows are laid out for; derived from `policy.megatron_cfg` where nothing else is said."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages that say what to train (`weight`, `loss`, …) or hold text that is not rendered (`reasoning_content`, …) and are passed over
    all the same; rows with others are refused (SPEC R-KEYS-1)."""
    allow_format_misfit: bool = False
    """Whether to train although the tokenizer lacks the prompt format's markers, which are then text (SPEC R-FIT-1)."""

    @property
    def is_packed(self) -> bool:
        """Return whether the rows were packed ahead of time."""
        return self.dataset_name == PACKED


@dataclass(frozen=True, kw_only=True)
class Data:
    """Section `data`. A split is one dataset or a list of them."""

    train: tuple[Dataset, ...]
    """Datasets trained on, one after the other within an epoch; a packed one stands alone."""
    validation: tuple[Dataset, ...] = ()
    """Datasets validated on; none: no validation."""
    default: DatasetDefaults = DatasetDefaults()
    """Values that the datasets of both splits take where they do not set their own."""
    shuffle: bool = False
    """False: file order, as Megatron-LM's sampler (`indices[i % n]`). True: a new seeded order each epoch, the same on every rank."""
    seed: int | None = None
    """Seed of the shuffle, 0 or more; None: derived, `sft.seed`."""
    order: Literal["sequential", "shuffle", "megatron-cyclic", "megatron-cyclic-sharded"] | None = None
    """Order of docs/SPEC.md#order; None: derived from `shuffle`. `megatron-cyclic`: what Megatron-LM's driver draws with `--dataloader-type cyclic`, one permutation of
    the samples of all `sft.max_num_steps`; `megatron-cyclic-sharded`: with `--data-sharding` too. Both need `last_batch: wrap` and `sft.max_num_epochs: null`."""
    last_batch: Literal["drop", "wrap", "stop"] = "drop"
    """Where an epoch ends inside a global batch: its last rows are left out and the next epoch begins (`drop`), the next epoch fills it up (`wrap`, Megatron-LM's
    sampler), or the job ends before it (`stop`; SPEC R-ORDER-3). A validation takes every row and fills its last batch up (R-ORDER-7)."""
    num_workers: int = 1
    """Processes of this rank that prepare rows ahead; 0: in the training process. Losses do not depend on it."""
    prefetch: int = 8
    """Microbatches prepared ahead per rank."""
    cache_folder: str | None = None
    """Folder of the files' indices; None: beside the file, else the user's cache (SPEC R-FILE-3)."""
    cache_dir: str | None = None
    """Direct: folder in which built rows are kept for later epochs, runs and the other ranks of the machine; None: rows are built each time. The rows are the same to the bit."""
    cache_limit_gb: float = 100.0
    """Gigabytes that `cache_dir` may take; caches that nobody uses are removed for new ones, the longest unused first, and then no more rows are stored."""
    certificate: str | None = None
    """Path of the `check.json` that `packproof check` wrote for this job: the run refuses to start where files, tokenizer or
    configuration are not those of the certificate (SPEC R-SETUP-23). None: the run starts, and says once how to make one."""
    verify_files: bool = False
    """Whether an index is compared with all bytes of its file, not only size, time and samples (SPEC R-FILE-4)."""
    max_input_seq_length: int | None = None
    """Online: a conversation of so many tokens or more is too long; None: derived, `policy.max_total_sequence_length`."""
    on_long_conversation: Literal["mask_out", "refuse"] = "mask_out"
    """Online: what a conversation does that is too long. `mask_out`, as NeMo-RL: it is cut to at most 4 tokens a message and counts nowhere
    (SPEC R-ONLINE-8); records and the closing table say how many. `refuse`: it stops the job."""
    add_bos: bool = True
    """Online: whether a conversation begins with the tokenizer's BOS, added where its text lacks it. A tokenizer without one adds nothing, and a note says so."""
    add_eos: bool = True
    """Online: whether a conversation ends with the tokenizer's EOS, added where its text lacks it."""
    add_generation_prompt: bool = False
    """Online: whether the chat template opens the assistant's turn behind each user and tool message, so that its header is not trained."""
    on_unjoined_pieces: Literal["refuse", "allow"] = "refuse"
    """Online: what a conversation does whose messages, rendered and encoded one by one, are not what they are together (SPEC R-ONLINE-9). `allow`
    feeds them as they are, as NeMo-RL does."""
