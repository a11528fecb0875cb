# SPDX-License-Identifier: Apache-2.0
"""Everything a toy run trains with, in one directory: model, tokenizer, data, and a manifest of how they
were made."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flashrl_verl.errors import FlashRLError
from flashrl_verl.quickstart.model import ToyModelConfig, build_model
from flashrl_verl.quickstart.task import Split, Task, TaskConfig, TaskProblem, verl_rows
from flashrl_verl.quickstart.tokenizer import build_tokenizer
from flashrl_verl.quickstart.warmup import Accuracy, Encoder, WarmupConfig, evaluate, warm_up

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

GENERATOR_VERSION = 1
"""Raise it when a change to this package changes what is made from the same seed."""
MANIFEST = "manifest.json"


class ModelChange(Protocol):
    """A dataclass that changes the warmed-up model in place (`benchmarks.toy.outliers.OutlierConfig`)."""

    def plant(self, model: Qwen2ForCausalLM, *, seed: int) -> None:
        """Change it."""


@dataclass(frozen=True, kw_only=True)
class AssetsConfig:
    """All that the assets depend on, besides the versions of torch and transformers."""

    seed: int = 0
    """Of the initial weights, the split, and the warm-up's order."""
    task: Task = field(default_factory=TaskConfig)
    model: ToyModelConfig = field(default_factory=ToyModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    outliers: ModelChange | None = None
    """Of the warmed-up model; None leaves it as it is."""

    def recipe(self) -> dict[str, Any]:
        """What a manifest must say for its assets to be used again."""
        config = asdict(self)
        if self.outliers is None:
            del config["outliers"]  # as before there were any: what is there is used again
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return {"generator": GENERATOR_VERSION, "config": config, "versions": versions}


@dataclass(frozen=True, kw_only=True)
class Assets:
    """Paths of the assets, and the record of the warm-up."""

    root: Path
    made: dict[str, Any]
    """`warmup_steps`, `warmup_seconds`, `device`, `parameters`, and the accuracies `probe` and `test` of the BF16 model
    on disk."""
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


def make_assets(
    root: Path,
    config: AssetsConfig,
    *,
    on_probe: Callable[[int, Accuracy], None] | None = None,
    device: str = "cpu",
) -> Assets:
    """Make the assets, or use those that are there if they were made by the same recipe.

    They are made beside `root` and moved there whole, so that an interruption leaves nothing half-made.

    Args:
        root: the directory; a directory that is not an earlier result is refused, not overwritten.
        config: the recipe.
        on_probe: told of the warm-up's progress: updates so far, accuracy.
        device: where the model is warmed up. The initial weights do not depend on it; sums in another order make other
            digits, so only a CPU's are promised to be the same again. Assets that are there are used whatever made
            them.

    Raises:
        FlashRLError: the warm-up did not reach its target, or `root` holds something else.
    """
    root = Path(root)
    made = made_before(root, config)
    if made is not None:
        return Assets(root=root, made=made, reused=True)
    if root.exists() and any(root.iterdir()) and not (root / MANIFEST).is_file():
        raise FlashRLError(
            f"{root} is not empty and has no {MANIFEST}, so it is not overwritten. Move it away, or choose "
            "another place: --output DIR."
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        made = _make(scratch, config, on_probe, device)
        scratch.chmod(0o755)  # mkdtemp's 0700 would hide the assets from a shared cluster's other nodes
        if root.exists():
            shutil.rmtree(root)
        scratch.replace(root)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Assets(root=root, made=made, reused=False)


def whole_manifest(root: Path) -> dict[str, Any] | None:
    """What `root`'s manifest says, if all files that it names are there in their size; else None."""
    try:
        manifest = json.loads((root / MANIFEST).read_text())
        whole = all((root / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def made_before(root: Path, config: AssetsConfig) -> dict[str, Any] | None:
    """The record in `root`'s manifest, if its recipe is the same and its files are there; else None."""
    manifest = whole_manifest(root) or {}
    return manifest.get("made") if manifest.get("recipe") == config.recipe() else None


def _make(
    root: Path, config: AssetsConfig, on_probe: Callable[[int, Accuracy], None] | None, device: str
) -> dict[str, Any]:
    split = config.task.split(config.seed)
    for name, problems in (("train", split.train), ("test", split.test)):
        _write_parquet(problems, root / f"{name}.parquet", name, config.task.data_source)
    with _one_thread():
        made = _make_model(root / "model", split, config, on_probe, device)
    files = {str(f.relative_to(root)): f.stat().st_size for f in sorted(root.rglob("*")) if f.is_file()}
    manifest = {"recipe": config.recipe(), "made": made, "files": files}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return made


def _make_model(
    path: Path, split: Split, config: AssetsConfig, on_probe: Callable[[int, Accuracy], None] | None, device: str
) -> dict[str, Any]:
    import torch

    tokenizer = build_tokenizer(config.model.max_position_embeddings)
    model = build_model(tokenizer, config.model, seed=config.seed).to(device)
    result = warm_up(
        model,
        tokenizer,
        split,
        slip_rate=config.task.slip_rate,
        config=config.warmup,
        seed=config.seed,
        on_probe=on_probe,
    )
    if config.outliers is not None:
        config.outliers.plant(model, seed=config.seed)
    with _no_progress_bar():
        model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    model.float()  # the rounded weights, evaluated without further rounding
    encoder = Encoder(tokenizer)
    return {
        "warmup_steps": result.steps,
        "warmup_seconds": round(result.seconds, 1),
        "device": device,
        "parameters": sum(p.numel() for p in model.parameters()),
        "probe": asdict(evaluate(model, encoder, split.probe)),
        "test": asdict(evaluate(model, encoder, split.test)),
    }


def _write_parquet(problems: tuple[TaskProblem, ...], path: Path, split: str, data_source: str) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(verl_rows(problems, split=split, data_source=data_source)), path
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for PyTorch: sums are then the same on machines of any size, and a busy core stalls nobody
    at a barrier."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Transformers draws one for writing a file of less than a megabyte."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
