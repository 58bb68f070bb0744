"""A driver script of the suite's own, in the place of Megatron-LM's `pretrain_gpt.py`: the installed package's `pretrain`, with this suite's forward step.

Tests copy it to a source tree of their own. It shows that the stand-ins, what is observed and the checkpoints hold on the installed `pretrain`;
that the real script trains the same is held with a checkout.
"""

import importlib.util

import model_provider  # a neighbour of the script, as the real one has it
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from equivalence.trainers import megatron_step


def datasets(samples):
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
    )
    return BlendedMegatronDatasetBuilder(SFTDataset, samples, lambda: True, config).build()


def forward_step(rows, model):
    numbered = iter([(0, next(rows))])
    return megatron_step._forward_step(numbered, model, length=get_args().seq_length, observe=None)


if __name__ == "__main__":
    datasets.is_distributed = True
    assert model_provider.IS_A_NEIGHBOUR
    assert importlib.util.find_spec("megatron.only_in_the_tree") is None, "two trees of megatron are mixed"
    arguments = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
