# SPDX-License-Identifier: Apache-2.0
"""``flashrl eval``: one run of verl's validation for each precision, by the recipe in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import ConfigError, FlashRLError, listed
from flashrl_verl.settings import Precision
from flashrl_verl.tools.evaluate import metrics
from flashrl_verl.tools.export.checkpoint import Checkpoint
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import ProcessTree
from flashrl_verl.tools.recipe_process import ROOT
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

CONFIG, RESPONSES, LOG = "config.yaml", "responses.jsonl", "eval.log"
"""In a precision's folder: what the recipe is started with, what verl's validation dumped, what was said."""

Values = dict[tuple[str, str], list[float]]
"""(prompt, ground truth) -> what each response is worth."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What the command line says."""

    checkpoint: Checkpoint
    precisions: tuple[Precision, ...]
    """In this order; the others are compared with the first."""
    n: int
    """Responses to each prompt."""
    temperature: float
    output: Path
    overrides: tuple[str, ...] = ()
    """Hydra's, over the run's configuration."""

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(f"--temperature 0 is greedy: all --n {self.n} responses would be one. Set --n 1")


# ---- the configuration ----


def kept_config(checkpoint: Checkpoint) -> Path | None:
    """The configuration that the trainer saved in the checkpoint; None where there is none."""
    file = checkpoint.path.parent / CONFIG
    return file if checkpoint.sharded and file.is_file() else None


def compose(config: EvalConfig) -> DictConfig:
    """What every precision shares: the run's configuration with the overrides, or the recipe's defaults with them.

    Raises:
        ConfigError: Hydra refuses an override.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    from flashrl_verl.tools import recipe_process

    kept, words = kept_config(config.checkpoint), list(config.overrides)
    if kept is None:
        cfg = recipe_process.compose(words)
        for key, value in (config.checkpoint.settings or {}).items():  # the run's record, where nothing is said
            if not any(word.startswith(f"flashrl.{key}=") for word in words):
                cfg.flashrl[key] = value
        return cfg
    try:
        with initialize_config_dir(str(kept.parent), version_base=None):
            cfg = hydra_compose(kept.stem, words)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"Hydra refuses the overrides {' '.join(words)} of {kept}: {error}") from error
    with open_dict(cfg):  # kept ones are resolved: what workers read would not follow
        cfg.actor_rollout_ref.rollout.custom.flashrl = "${flashrl}"
        cfg.actor_rollout_ref.actor.policy_loss.rollout_correction = "${algorithm.rollout_correction}"
    return cfg


def validation_only(shared: DictConfig, config: EvalConfig, precision: Precision, model: Path) -> DictConfig:
    """The configuration of one precision: verl's validation of ``model``, and no training."""
    from omegaconf import open_dict

    cfg = shared.copy()
    with open_dict(cfg):
        flashrl, trainer, rollout = cfg.flashrl, cfg.trainer, cfg.actor_rollout_ref.rollout
        flashrl.precision, flashrl.bf16_replica_fraction = precision.value, 0.0
        if precision is not Precision.INT8:
            flashrl.rotation = None
        if precision is Precision.BF16:
            flashrl.kv_cache, flashrl.ignore, flashrl.keep_first_layers, flashrl.keep_last_layers = "auto", [], 0, 0
        cfg.actor_rollout_ref.model.path = str(model)
        trainer.val_only = trainer.val_before_train = True
        trainer.resume_mode, trainer.logger, trainer.log_val_generations = "disable", ["console"], 0
        trainer.validation_data_dir = str(config.output / precision.value / "dump")
        trainer.rollout_data_dir = None
        sampling = {"n": config.n, "do_sample": config.temperature > 0, "temperature": config.temperature}
        rollout.val_kwargs.update(sampling)
        # verl checks the training's batches too, and loads its data: the least that any number of GPUs can cut.
        ranks = trainer.nnodes * trainer.n_gpus_per_node
        cfg.data.train_files, cfg.data.train_batch_size = cfg.data.val_files, ranks
        cfg.actor_rollout_ref.actor.ppo_mini_batch_size, rollout.n = ranks, 1
        cfg.algorithm.filter_groups.enable = False
        cfg.actor_rollout_ref.actor.use_dynamic_bsz = rollout.log_prob_use_dynamic_bsz = True
    return cfg


# ---- the runs ----


def run(config: EvalConfig, console: Console) -> str:
    """Evaluate every precision that is not done yet, and write ``eval.json`` and ``eval.md``.

    Args:
        config: what.
        console: told which precision runs, and since when.

    Returns:
        What ``eval.md`` holds.

    Raises:
        ConfigError: something cannot be evaluated so, or ``config.output`` holds another evaluation.
        FlashRLError: a run failed; finished precisions stay finished.
    """
    from omegaconf import OmegaConf

    from flashrl_verl.tools.dry_run import difference
    from flashrl_verl.validation import check_paths, validate_config

    shared, output = compose(config), config.output
    model = output / "model" if config.checkpoint.sharded else config.checkpoint.path
    configs = {precision: validation_only(shared, config, precision, model) for precision in config.precisions}
    for cfg in configs.values():
        validate_config(cfg)
        check_paths(cfg, made_later=output)
    _require_same(config)
    for precision, cfg in configs.items():
        folder, text = output / precision.value, OmegaConf.to_yaml(cfg)
        if (folder / RESPONSES).is_file():
            if (folder / CONFIG).read_text() != text:
                rows = difference(cfg, OmegaConf.load(folder / CONFIG))
                raise ConfigError(
                    f"{folder} holds an evaluation with other settings: "
                    f"{', '.join(f'{key} was {old} and is {new}' for key, old, new in rows)}. Remove it, or choose "
                    "another --output"
                )
            console.print(f"{precision.value}: done before", highlight=False)
            continue
        if config.checkpoint.sharded and not model.exists():
            from flashrl_verl.tools.export.merge import merge

            merge(config.checkpoint, model)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, text.encode())
        _validate(precision, folder, console)
    found = {p: read(output / p.value / RESPONSES, config.n) for p in config.precisions}
    files = shared.data.val_files
    report = summarize(found, sources([files] if isinstance(files, str) else list(files)), config.n)
    facts = {
        "checkpoint": str(config.checkpoint.path),
        "step": config.checkpoint.step,
        "n": config.n,
        "temperature": config.temperature,
        "top_p": shared.actor_rollout_ref.rollout.val_kwargs.top_p,
        "top_k": shared.actor_rollout_ref.rollout.val_kwargs.top_k,
        "max_response_length": shared.data.max_response_length,
        "interval": {"level": metrics.LEVEL, "method": metrics.METHOD},
    }
    text = table(report, [precision.value for precision in config.precisions])
    write_whole(output / "eval.json", (json.dumps(facts | report, indent=1) + "\n").encode())
    sampling = ", ".join(f"{key} {facts[key]:g}" for key in ("temperature", "top_p", "top_k"))
    title = f"# {config.checkpoint.name}: {config.n} responses a problem, {sampling}\n\n"
    write_whole(output / "eval.md", (title + text + "\n").encode())
    return title + text


def _require_same(config: EvalConfig) -> None:
    """Keep the checkpoint that an output is of: another's responses must not be taken for this one's."""
    file = config.output / "checkpoint.json"
    own = {"path": str(config.checkpoint.path), "files": config.checkpoint.fingerprint()}
    if file.is_file() and json.loads(file.read_text()) != own:
        raise ConfigError(
            f"{config.output} holds the evaluation of {json.loads(file.read_text())['path']}, of other weights than "
            f"are in {config.checkpoint.path} now. Remove it, or choose another --output"
        )
    config.output.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(own).encode())


def _validate(precision: Precision, folder: Path, console: Console) -> None:
    """Run verl's validation; its dump becomes ``RESPONSES`` when it is whole."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = ["--config-path", str(folder), "--config-name", Path(CONFIG).stem]
    words += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
    log = folder / LOG
    console.print(f"{precision.value}: verl's validation, log {log}", highlight=False, soft_wrap=True)
    log.unlink(missing_ok=True)
    started = time.monotonic()
    tree = ProcessTree(
        [sys.executable, str(ROOT / "recipe" / "flashrl" / "main_flashrl.py"), *words],
        log,
        {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        Path.cwd(),
    )
    try:
        with console.status("") as status:
            while (code := tree.poll()) is None:
                status.update(f"{precision.value}: {time.monotonic() - started:.0f} s")
                time.sleep(1.0)
    finally:
        tree.end()
    dumped = sorted((folder / "dump").glob("*.jsonl"))
    if code or not dumped:
        error = "\n".join(last_error(log.read_text(errors="replace")))
        raise FlashRLError(f"the {precision.value} run failed (exit code {code}): {error}\nThe whole log: {log}")
    os.replace(dumped[-1], folder / RESPONSES)
    shutil.rmtree(folder / "dump")
    console.print(f"{precision.value}: done in {time.monotonic() - started:.0f} s", highlight=False)


# ---- the figures ----


def read(file: Path, n: int) -> Values:
    """What verl's validation dumped, by problem; copies of a problem count as one with more responses.

    Args:
        file: JSON lines with ``input``, ``gts``, ``score`` and, where the reward gives it, ``acc``, which verl's own
            figures are made of too.
        n: responses to each prompt.

    Raises:
        FlashRLError: responses are missing.
    """
    found: Values = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        value = row.get("acc")
        found.setdefault((row["input"], str(row["gts"])), []).append(float(row["score"] if value is None else value))
    if short := [prompt for (prompt, _), values in found.items() if len(values) % n]:
        raise FlashRLError(
            f"{file}: {len(short)} prompts have not {n} responses each ({listed([repr(p[-60:]) for p in short], 2)}): "
            f"requests failed, see {file.with_name(LOG)}. Remove {file.parent} and run the same command"
        )
    return found


def sources(files: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """What verl's dump lacks: ground truth -> (text of the last message, data source) of the rows that have it."""
    import pyarrow.parquet

    found: dict[str, list[tuple[str, str]]] = {}
    for file in files:
        for row in pyarrow.parquet.read_table(Path(file).expanduser()).to_pylist():
            content = row["prompt"][-1]["content"]
            pair = (content if isinstance(content, str) else "", str(row.get("data_source", "unknown")))
            found.setdefault(str((row.get("reward_model") or {}).get("ground_truth")), []).append(pair)
    return found


def summarize(
    found: dict[Precision, Values], known: dict[str, list[tuple[str, str]]], n: int
) -> dict[str, dict[str, Any]]:
    """Figures by data source, metric and precision, and their differences to the first precision's.

    Args:
        found: responses' values by precision.
        known: of ``sources``.
        n: responses to each prompt.

    Raises:
        FlashRLError: the precisions did not answer the same problems.
    """
    first, *others = found
    for other in others:
        if found[other].keys() != found[first].keys():
            raise FlashRLError(
                f"{first.value} and {other.value} answered different problems: the data changed between them. Evaluate "
                "both again, with another --output"
            )
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in found[first]:
        source = next((name for text, name in known.get(key[1], ()) if text in key[0]), "unknown")
        groups.setdefault(source, []).append(key)
    if len(groups) > 1:
        groups["all"] = list(found[first])
    figures: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    for source, keys in groups.items():
        columns = {p: metrics.per_problem([values[key] for key in keys], n) for p, values in found.items()}
        for name in columns[first]:
            figures.setdefault(source, {})[name] = {
                p.value: asdict(metrics.interval(column[name])) for p, column in columns.items()
            }
            differences.setdefault(source, {})[name] = {
                p.value: asdict(metrics.interval(columns[p][name] - columns[first][name], floor=-1.0)) for p in others
            }
    problems = {source: len(keys) for source, keys in groups.items()}
    return {"problems": problems, "figures": figures, "differences": differences}


def table(report: dict[str, dict[str, Any]], precisions: Sequence[str]) -> str:
    """The figures in Markdown."""
    first, *others = precisions
    rows = [["data source", "problems", "metric", *precisions, *(f"{other} - {first}" for other in others)]]
    for source, by_metric in report["figures"].items():
        for name, row in by_metric.items():
            cells = [row[p] for p in precisions] + [report["differences"][source][name][p] for p in others]
            figures = [str(metrics.Figure(**cell)) for cell in cells]
            rows.append([source, str(report["problems"][source]), name, *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
