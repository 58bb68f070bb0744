"""Write the weights of a checkpoint of any layout, whole, to one file: `python -m production.training.export
CHECKPOINT OUT.safetensors`.

With `--huggingface NAME` the output is a Hugging Face checkpoint in the folder OUT, through Megatron-Bridge; with `--megatron-lm` it is a
folder that Megatron-LM's `--load` takes. One process does the export, with memory for the model twice, and needs
neither the job's layout nor its data; the plain file and Megatron-LM's folder need no device.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException

from production import exits
from production.errors import PackproofError
from production.library_warnings import quiet_process

if TYPE_CHECKING:  # it imports megatron-core
    from production.training.checkpoint.manifest import Manifest

_STACK = re.compile(r"^(decoder\.layers)\.(?!\d)")
_OF_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options of the transformer that divide the layers among pipeline stages."""
_EXPERTS = re.compile(r"\.experts\.experts\.")


def export(checkpoint: Path, out: Path) -> dict[str, tuple[int, ...]]:
    """Verify a checkpoint and write its weights, layer by layer and expert by expert; return their shapes by name.

    Names are those of the unsharded model, with norms named as in Transformer Engine's fused layers, as in every
    checkpoint of megatron-core (`self_attention.linear_qkv.layer_norm_weight`). The file appears whole or not at all;
    its metadata is `step` and `config`, the job as JSON. Raises PackproofError for a checkpoint that is damaged or
    holds no weights. Call it in a process without a process group.
    """
    with _alone():
        manifest = _verified(checkpoint)
        tensors = {
            name: tensor for key, whole in stored_weights(checkpoint).items() for name, tensor in _apart(key, whole)
        }
    if not tensors:
        raise PackproofError(what="it holds no weights", where=str(checkpoint), fix="give a checkpoint of a job")
    beside = out.with_name(f".{out.name}.writing")
    try:
        save_file(tensors, beside, metadata={"step": str(manifest.step), "config": json.dumps(manifest.config)})
        beside.replace(out)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise _unwritable(out, error) from error
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def export_huggingface(checkpoint: Path, name: str, folder: Path) -> None:
    """Verify a checkpoint, build its model in this process and write it as Hugging Face's `name` is written, into `folder`.

    `name` is a folder or a Hugging Face name of the same architecture: its config and tokenizer go along. Raises PackproofError as
    `export`, for a folder that is not empty, and where Megatron-Bridge is not installed or does not know the architecture. Call it in
    a process without a process group. Never run with Megatron-Bridge itself, which wants CUDA.
    """
    from production.model.model import build_model  # noqa: PLC0415 - heavy, as those below
    from production.parallel.sizes import ParallelSizes  # noqa: PLC0415
    from production.training.checkpoint.huggingface import check_bridge, save_huggingface  # noqa: PLC0415
    from production.training.checkpoint.weights import load_weights  # noqa: PLC0415
    from production.training.distributed.launch import launched  # noqa: PLC0415

    check_bridge("export --huggingface")  # before the work
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _unwritable(folder, "it is there already")
    with launched(ParallelSizes(), device="auto", timeout_seconds=600, seed=0, deterministic=False):
        model = build_model(_settings(_verified(checkpoint)), ParallelSizes())
        load_weights(checkpoint, model)
        save_huggingface(model, name, folder)


def export_megatron_lm(checkpoint: Path, folder: Path) -> Path:
    """Verify a checkpoint and write its weights into `folder` as Megatron-LM does; return the folder of its iteration.

    Megatron-LM starts from it with `--load FOLDER --finetune`, in any layout, and takes the model's shape from it with
    `--use-checkpoint-args`. Raises PackproofError as `export`, and for a folder that is not empty. Call it in a process without a process group.
    """
    from production.training.checkpoint.megatron_lm import model_arguments, stored_objects, write_folder  # noqa: PLC0415

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _unwritable(folder, "it is there already")
    with _alone():
        manifest = _verified(checkpoint)
        arguments = model_arguments(
            _settings(manifest), iteration=manifest.step, consumed_samples=manifest.consumed_samples
        )
        weights, objects = stored_weights(checkpoint), stored_objects(checkpoint)
        if not weights:
            raise PackproofError(what="it holds no weights", where=str(checkpoint), fix="give a checkpoint of a job")
        try:
            with _whole_or_empty(folder):
                return write_folder(weights, objects, arguments=arguments, iteration=manifest.step, folder=folder)
        except (OSError, CheckpointException) as error:
            raise _unwritable(folder, error) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0 done, 2 the checkpoint cannot be exported."""
    quiet_process()
    return exits.run(_main, arguments)


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m production.training.export", description="Weights in one file.")
    parser.add_argument("checkpoint", type=Path, help="a folder step_NNNNNNNN")
    parser.add_argument(
        "out",
        type=Path,
        help="the file to write, such as weights.safetensors; a folder for --huggingface and --megatron-lm",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--huggingface",
        metavar="NAME",
        help="write a Hugging Face checkpoint instead, as NAME (a folder or a name) is written; needs Megatron-Bridge",
    )
    form.add_argument(
        "--megatron-lm", action="store_true", help="write a folder instead that Megatron-LM's --load takes (--finetune)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.megatron_lm:
            written = export_megatron_lm(options.checkpoint, options.out)
            print(f"{written}; Megatron-LM starts from it with --load {options.out} --finetune")
            return 0
        if options.huggingface is not None:
            export_huggingface(options.checkpoint, options.huggingface, options.out)
            print(f"{options.out}, in the form of {options.huggingface}")
            return 0
        shapes = export(options.checkpoint, options.out)
    except PackproofError as error:
        print(f"failed: {error}", file=sys.stderr)
        return exits.CANNOT_RUN
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    print(f"{len(shapes)} tensors, {count:,} values: {options.out}")
    return 0


def _verified(checkpoint: Path) -> Manifest:
    from production.training.checkpoint.manifest import MANIFEST, verify  # noqa: PLC0415 - imports megatron-core
    from production.training.checkpoint.weights import not_one  # noqa: PLC0415

    if not (checkpoint / MANIFEST).is_file():
        raise not_one(checkpoint)
    return verify(checkpoint)


def _settings(manifest: Manifest) -> Any:
    """Return the model's settings, from the job that the checkpoint holds, without its layout."""
    from production.training.config import load, model_settings  # noqa: PLC0415

    alone = [
        f"policy.megatron_cfg.{name}_parallel_size=1"
        for name in ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
    ]
    config = copy.deepcopy(manifest.config)
    if config["model"]["hybrid_layer_pattern"] is not None:
        config["model"]["hybrid_layer_pattern"] = config["model"]["hybrid_layer_pattern"].replace("|", "")
    for name in _OF_STAGES:
        config["policy"]["megatron_cfg"]["transformer"].pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(config))
        job = load(path, [*alone, "policy.megatron_cfg.sequence_parallel=false"])
    return model_settings(job, int(manifest.fingerprint["model.vocab_size"]))


@contextlib.contextmanager
def _whole_or_empty(folder: Path) -> Iterator[None]:
    """Remove `folder`, which held nothing before, where writing it fails: half of it would be in the way of the next try."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _unwritable(out: Path, why: object) -> PackproofError:
    return PackproofError(what=f"it cannot be written: {why}", where=str(out), fix="name another place, with room")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Make a world of one rank on the CPU, which megatron-core's loading needs."""
    from production.model.device.shim import cpu_shim  # noqa: PLC0415 - heavy

    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with cpu_shim():
            yield
    finally:
        distributed.destroy_process_group()


def stored_weights(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Return the weights of a checkpoint of a job or of Megatron-LM (torch_dist), whole, under megatron-core's names.

    Each is a whole tensor [its own shape], in the dtype that it was saved in. Call it in a process group of one rank, within the CPU shim where CUDA is absent.
    """
    from megatron.core import dist_checkpointing  # noqa: PLC0415 - heavy

    # Without the optimizer's: at two moments and a copy in float32 it is several times the model.
    wanted: dict[str, Any] = {
        name: entry
        for name, entry in dist_checkpointing.load_tensors_metadata(str(checkpoint)).items()
        if "optimizer." not in name  # a chain of them begins otherwise
    }
    found = dist_checkpointing.load(wanted, str(checkpoint), validate_access_integrity=False)
    return {name: found[name] for name in wanted if isinstance(found[name], torch.Tensor)}


def _apart(name: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split stacked tensors: megatron-core saves the layers of a stack, and the experts of a layer, as one tensor
    with an axis in front.
    """
    if _STACK.search(name):
        for number, layer in enumerate(whole):
            yield from _apart(_STACK.sub(rf"\1.{number}.", name), layer)
    elif _EXPERTS.search(name):
        for number, expert in enumerate(whole):
            yield _EXPERTS.sub(f".experts.local_experts.{number}.", name), expert.contiguous()
    else:
        yield name, whole.contiguous()


if __name__ == "__main__":
    raise SystemExit(main())
