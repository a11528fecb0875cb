# SPDX-License-Identifier: Apache-2.0
"""Everything a toy run trains with, in one directory: model, tokenizer, data, and a manifest of how they
were made."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashrl_verl.errors import FlashRLError
from flashrl_verl.quickstart.model import ToyModelConfig, build_model
from flashrl_verl.quickstart.task import Split, TaskConfig, split_problems, verl_rows
from flashrl_verl.quickstart.tokenizer import build_tokenizer
from flashrl_verl.quickstart.warmup import Accuracy, Encoder, WarmupConfig, evaluate, warm_up

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class AssetsConfig:
    """All that the assets depend on, besides the versions of torch and transformers."""

    seed: int = 0
    """Of the initial weights, the split, and the warm-up's order."""
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ToyModelConfig = field(default_factory=ToyModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)

    def recipe(self) -> dict[str, Any]:
        """What a manifest must say for its assets to be used again."""
        return {"config": asdict(self)} | {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


@dataclass(frozen=True, kw_only=True)
class Assets:
    """Paths of the assets, and the record of the warm-up."""

    root: Path
    made: dict[str, Any]
    """`warmup_steps`, `warmup_seconds`, `parameters`, and the accuracies `probe` and `test` of the BF16 model on
    disk."""
    reused: bool
    """Whether they were there already."""

    @property
    def model(self) -> Path:
        """Checkpoint and tokenizer in Hugging Face's layout."""
        return self.root / "model"

    @property
    def train(self) -> Path:
        """Training prompts, verl's parquet format."""
        return self.root / "train.parquet"

    @property
    def test(self) -> Path:
        """Held-out prompts, verl's parquet format."""
        return self.root / "test.parquet"


def made_before(root: Path, config: AssetsConfig) -> dict[str, Any] | None:
    """The record of the assets in `root` if they were made by this recipe; else None."""
    try:
        manifest = json.loads((root / MANIFEST).read_text())
    except OSError:
        return None
    return manifest["made"] if manifest["recipe"] == config.recipe() else None


def make_assets(
    root: Path,
    config: AssetsConfig,
    *,
    on_probe: Callable[[int, Accuracy], None] | None = None,
) -> Assets:
    """Make the assets, or use those that are there if they were made by the same recipe.

    They are made beside `root` and moved there whole, so that an interruption leaves nothing half-made.

    Args:
        root: the directory; a directory that is not an earlier result is refused, not overwritten.
        config: the recipe.
        on_probe: told of the warm-up's progress: updates so far, accuracy.

    Raises:
        FlashRLError: the warm-up did not reach its target, or `root` holds something else.
    """
    root = Path(root)
    if (made := made_before(root, config)) is not None:
        return Assets(root=root, made=made, reused=True)
    if root.exists() and any(root.iterdir()) and not (root / MANIFEST).is_file():
        raise FlashRLError(
            f"{root} is not empty and has no {MANIFEST}, so it is not overwritten. Move it away, or choose "
            "another place: --output DIR."
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        made = _make(scratch, config, on_probe)
        scratch.chmod(0o755)  # mkdtemp's 0700 would hide the assets from a shared cluster's other nodes
        if root.exists():
            shutil.rmtree(root)
        scratch.replace(root)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Assets(root=root, made=made, reused=False)


def _make(root: Path, config: AssetsConfig, on_probe: Callable[[int, Accuracy], None] | None) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet
    import torch

    split = split_problems(config.task, seed=config.seed)
    for name, problems in (("train", split.train), ("test", split.test)):
        rows = verl_rows(problems, split=name)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / f"{name}.parquet")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums on machines of any size, and a busy core stalls nobody at a barrier
    try:
        made = _make_model(root / "model", split, config, on_probe)
    finally:
        torch.set_num_threads(threads)
    (root / MANIFEST).write_text(json.dumps({"recipe": config.recipe(), "made": made}, indent=2) + "\n")
    return made


def _make_model(
    path: Path, split: Split, config: AssetsConfig, on_probe: Callable[[int, Accuracy], None] | None
) -> dict[str, Any]:
    import torch
    from transformers.utils import logging

    started = time.monotonic()
    tokenizer = build_tokenizer(config.model.max_position_embeddings)
    model = build_model(tokenizer, config.model, seed=config.seed)
    steps = warm_up(
        model,
        tokenizer,
        split,
        slip_rate=config.task.slip_rate,
        config=config.warmup,
        seed=config.seed,
        on_probe=on_probe,
    )
    seconds = time.monotonic() - started
    logging.disable_progress_bar()  # for writing a file of a megabyte
    model.to(torch.bfloat16).save_pretrained(path)
    logging.enable_progress_bar()
    tokenizer.save_pretrained(path)
    model.float()  # the rounded weights, evaluated without further rounding
    encoder = Encoder(tokenizer)
    return {
        "warmup_steps": steps,
        "warmup_seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "probe": asdict(evaluate(model, encoder, split.probe)),
        "test": asdict(evaluate(model, encoder, split.test)),
    }
