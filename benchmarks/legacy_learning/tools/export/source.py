# SPDX-License-Identifier: Apache-2.0
"""What is exported or evaluated: a checkpoint that verl's FSDP actors wrote, or a Hugging Face folder in high
precision.

A tensor is put together from the ranks' mapped files when its turn comes, so a checkpoint needs the memory of its
largest tensors. verl's own merger (``python -m verl.model_merger merge --backend fsdp``) gives the same weights and
reads all ranks' FP32 pieces into memory first; names, experts and tied tensors are converted here by verl's functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashrl_verl.errors import ConfigError, FlashRLError
from benchmarks.legacy_learning.tools.export import folder as hugging_face
from benchmarks.legacy_learning.tools.export.folder import read_object, some
from flashrl_verl.trainer import run_settings

RECORD = "export.json"
"""This package's record in a folder that it exported."""

_STEP = re.compile(r"global_step_(\d+)")
"""Name of the folder that verl saves a step in."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the weights are, and what is known of them."""

    path: Path
    """Folder of the weights: ``.../global_step_N/actor``, or the Hugging Face folder."""
    folder: Path
    """Folder of the model's configuration and tokenizer."""
    ranks: int | None
    """FSDP ranks that wrote it; None for a Hugging Face folder."""
    step: int | None
    """Training step, where it is known."""
    settings: dict[str, Any] | None
    """The run's record of its quantized layers (``run_settings.py``)."""
    config: dict[str, Any] = field(repr=False)
    """The model's config.json."""

    @property
    def name(self) -> str:
        """Of a folder to be made of it: that of the run, which may not be the only one with such a step, and the
        step."""
        path = self.path.absolute()
        if self.ranks is not None:
            return _name_of(path)
        # A model in the checkpoint that it was saved with, or in another folder of which it is the Hugging Face form.
        return f"{_name_of(path.parent)}-{path.name}".lstrip("-") if path.name == "huggingface" else path.name

    def files(self) -> list[Path]:
        """The files that hold the weights."""
        if self.ranks is None:
            return hugging_face.files(self.path)
        return [self.path / f"model_world_size_{self.ranks}_rank_{rank}.pt" for rank in range(self.ranks)]

    def fingerprint(self) -> list[list[Any]]:
        """Name, bytes and time of every file of weights: whether two commands saw the same checkpoint, without reading
        it."""
        found = [(file.name, file.stat()) for file in self.files()]
        return [[name, status.st_size, status.st_mtime_ns] for name, status in found]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor under its name in a Hugging Face checkpoint, in the dtype that it was saved in.

        Experts come one by one, tied tensors once.

        Raises:
            FlashRLError: names or shapes are not those of the model in ``folder``, or a file is damaged.
        """
        yield from hugging_face.tensors(self.path) if self.ranks is None else _of_ranks(self)

    def shapes(self) -> dict[str, torch.Size]:
        """Name and shape of all that ``tensors`` yields, without reading it."""
        if self.ranks is None:
            return hugging_face.shapes(self.path)
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        model = meta_model(self.folder)
        own = model.state_dict()
        named = ((name, own[key]) for name, key in _saved_names(model).items())
        return {name: tensor.shape for name, tensor in unfuse_moe_params(named, model.config.model_type)}


def _name_of(path: Path) -> str:
    """Of a checkpoint, by its folder or the actor's in it; of any other folder its own name.

    Args:
        path: absolute.
    """
    step = path.parent if path.name == "actor" else path
    run = step.parent.parent if step.parent.name == "checkpoints" else step.parent
    if not _STEP.fullmatch(step.name) or not run.name:
        return step.name
    if (
        re.fullmatch(r"previous-\d+", run.name) and run.parent.name
    ):  # moved aside in its run's folder (run_directory.py)
        return f"{run.parent.name}-{run.name}-{step.name}"
    return f"{run.name}-{step.name}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Find out what a folder holds.

    Args:
        path: ``<trainer.default_local_dir>/global_step_N``, its ``actor``, or a Hugging Face folder.

    Raises:
        ConfigError: it is none of them, or of a kind that cannot be read; the message says what to do.
    """
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder. Name a checkpoint, <trainer.default_local_dir>/global_step_<N>")
    from benchmarks.legacy_learning.tools.export.shards import saved_by

    actor = path / "actor" if (path / "actor").is_dir() else path
    if (saved := saved_by(actor)) is not None:
        if saved.fsdp == 1:
            raise ConfigError(
                f"{actor} was saved by FSDP 1, whose shards only as many ranks can read. Convert it first: python -m "
                "verl.model_merger merge --backend fsdp, and name its folder"
            )
        return _of_run(actor, saved.ranks)
    if (path / "config.json").is_file():
        return _of_hugging_face(path)
    found = [
        *path.glob("global_step_*"),
        *path.glob("checkpoints/global_step_*"),
    ]  # a run's folder may hold them one below
    steps = sorted(found, key=lambda step: (len(step.name), step.name))
    if steps:
        raise ConfigError(f"{path} holds {len(steps)} checkpoints. Name one of them, such as {steps[-1]}")
    if list(actor.glob("model/**/*dist_ckpt*")):
        raise ConfigError(
            f"{path} was saved by Megatron. Convert it first: python -m verl.model_merger merge --backend megatron"
        )
    raise ConfigError(
        f"{path} is neither a checkpoint of verl's FSDP actors (it has no fsdp_config.json, nor has actor/ in it) nor "
        "a Hugging Face folder (no config.json). Name <trainer.default_local_dir>/global_step_<N>; a run saves such "
        "folders with trainer.save_freq=<every so many steps>, and the quickstart saves none without"
    )


def _of_run(actor: Path, ranks: int) -> Checkpoint:
    folder = actor / "huggingface"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{actor} has no huggingface/config.json, so it is not known what model its weights are")
    named = [actor / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    if missing := [file.name for file in named if not file.is_file()]:
        raise FlashRLError(
            f"{actor} was saved by {ranks} ranks, and {len(missing)} of their files are not here ({some(missing)}). "
            "Copy them from the nodes that wrote them"
        )
    step_folder = actor.parent if actor.name == "actor" else actor
    step = _STEP.fullmatch(step_folder.name)
    return Checkpoint(
        path=actor,
        folder=folder,
        ranks=ranks,
        step=int(step[1]) if step else None,
        settings=run_settings.load(step_folder),
        config=read_object(folder / "config.json"),
    )


def _of_hugging_face(path: Path) -> Checkpoint:
    config = read_object(path / "config.json")
    if (quantized := config.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{path} is quantized already ({method}). Name the high-precision checkpoint that it was made of"
        )
    if not list(path.glob("*.safetensors")):
        raise ConfigError(f"{path} holds no weights (*.safetensors). Save the model with safetensors first")
    record = {}
    if (path / RECORD).is_file():
        record = read_object(path / RECORD)
    return Checkpoint(
        path=path, folder=path, ranks=None, step=record.get("step"), settings=record.get("settings"), config=config
    )


# ---- verl's FSDP ranks ----


def _of_ranks(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    from benchmarks.legacy_learning.tools.export.shards import load_all, whole

    states = load_all(checkpoint.path, checkpoint.ranks)
    model = meta_model(checkpoint.folder)
    wanted, names = model.state_dict(), _saved_names(model)
    _require_names(checkpoint, set(states[0]), set(wanted), set(names.values()))
    _require_tied(set(states[0]) - set(names.values()), model, states)
    for name, own in names.items():
        tensor = whole([state[own] for state in states], own)
        if tensor.shape != wanted[own].shape:
            raise FlashRLError(
                f"{checkpoint.path}: {own} has {tuple(tensor.shape)}, and by huggingface/config.json "
                f"{tuple(wanted[own].shape)}"
            )
        yield from unfuse_moe_params([(name, tensor)], model.config.model_type)


def _saved_names(model: Any) -> dict[str, str]:
    """Names in a Hugging Face checkpoint to the model's own; tied tensors once."""
    from verl.utils.model import convert_weight_keys
    from verl.utils.transformers_compat import drop_tied_target_keys

    names = {name: name for name in model.state_dict()}
    drop_tied_target_keys(names, model, model.config)
    return convert_weight_keys(names, model)


def meta_model(folder: Path) -> Any:
    """The model of a folder's configuration, without storage: its names and shapes.

    Raises:
        ConfigError: transformers cannot build it.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            build = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config
            return build(config, dtype=torch.bfloat16)
    except Exception as error:  # noqa: BLE001 - transformers raises several kinds, of many lines
        line = str(error).strip().splitlines()[0]
        raise ConfigError(f"{folder}: transformers cannot build its model: {line}") from error


def _require_names(checkpoint: Checkpoint, found: set[str], wanted: set[str], required: set[str]) -> None:
    """``required`` is ``wanted`` without what is tied to something else, which a checkpoint may have or not."""
    if any("lora_" in name for name in found):
        raise ConfigError(
            f"{checkpoint.path} holds LoRA adapters, which are not merged here. Use python -m verl.model_merger merge "
            "--backend fsdp, which writes model and adapter apart"
        )
    missing, unexpected = sorted(required - found), sorted(found - wanted)
    if missing or unexpected:
        raise FlashRLError(
            f"{checkpoint.path} is not of the model in huggingface/config.json: {len(missing)} tensors are missing "
            f"({some(missing)}), {len(unexpected)} are unexpected ({some(unexpected)})"
        )


def _require_tied(left_out: set[str], model: Any, states: list[dict[str, Any]]) -> None:
    """A tensor is left out because it is tied: it has to be the one that it is tied to."""
    from benchmarks.legacy_learning.tools.export.shards import whole

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in left_out:
        partner = next(other for other in parameters if other not in left_out and parameters[other] is parameters[name])
        one, other = (whole([state[key] for state in states], key) for key in (name, partner))
        if not torch.equal(one, other):
            raise FlashRLError(
                f"{name} is tied to {partner} by huggingface/config.json, and differs from it in the checkpoint"
            )
