# SPDX-License-Identifier: Apache-2.0
"""`flashrl eval`: verl's own validation (`trainer.val_only`) of checkpoints by precision, each in a process of its own,
and what its dumps say: mean@n and pass@k with 95 % intervals, and differences in pairs."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.console import new_console
from flashrl_verl.tools.export.checkpoint import Checkpoint, find
from flashrl_verl.tools.log_excerpt import last_error, last_line
from flashrl_verl.tools.process_tree import ProcessTree, Stopped, stoppable
from flashrl_verl.tools.recipe_process import ROOT, compose, quoted
from flashrl_verl.trainer.atomic_write import write_atomically

if TYPE_CHECKING:
    from flashrl_verl.tools.intervals import Figure

RESPONSES, LOG = "responses.jsonl", "eval.log"
"""By checkpoint and precision: what verl's validation dumped, and the recipe's output."""

Values = dict[tuple[str, str], list[float]]
"""(prompt, ground truth) -> what each response is worth."""


def _precisions(text: str) -> list[Precision]:
    try:
        return [Precision(word) for word in text.split(",")]
    except ValueError as error:
        known = ", ".join(precision.value for precision in Precision)
        raise typer.BadParameter(f"{text!r} is not of {known}, separated by commas") from error


def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT... [KEY=VALUE...]", help="Runs, their global_step_N, Hugging Face folders."),
    ],
    precision: Annotated[
        Any,
        typer.Option(
            parser=_precisions,
            metavar="NAME,...",
            help="bf16, int8, fp8, or several of them. The KV cache is BF16, unless a word is flashrl.kv_cache=...",
        ),
    ] = "bf16",
    n: Annotated[int, typer.Option("--n", min=1, help="Responses to each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Of the sampling; 0 is greedy, for --n 1.")] = 1.0,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("outputs/eval"),
) -> None:
    """Evaluate checkpoints with verl's validation: mean@n and pass@k with 95 % intervals, and differences to the first.

    Words with = are Hydra overrides, for instance data.val_files=aime.parquet trainer.n_gpus_per_node=4. They change
    the configuration that the checkpoint holds; for a Hugging Face folder, the recipe's defaults (add experiment=<the
    run's>). Rerun to resume: what is done is not generated again.
    """
    from rich.table import Table

    overrides = [word for word in words if ("=" in word or word.startswith("~")) and not os.path.exists(word)]
    checkpoints = [find(Path(word)) for word in words if word not in overrides]
    if not checkpoints:
        raise ConfigError("name a checkpoint: a run, its global_step_<N>, or a Hugging Face folder")
    sampling = {"n": n, "do_sample": temperature > 0, "temperature": temperature}
    console, output, found = new_console(), output.expanduser().resolve(), {}
    try:
        with stoppable():
            for checkpoint, chosen in itertools.product(checkpoints, precision):
                merged = output / f"{checkpoint.name}-{_digest(str(checkpoint.path), checkpoint.fingerprint())}"
                model = merged / "model" if checkpoint.sharded else checkpoint.path
                command = [*recipe_words(configuration(checkpoint, merged), chosen, sampling, model), *overrides]
                folder = merged / f"{chosen.value}-{_digest(command)}"
                same = [one for one in checkpoints if one.name == checkpoint.name]
                of = checkpoint.name if len(same) == 1 else merged.name
                name = chosen.value if len(checkpoints) == 1 else f"{of} {chosen.value}"
                done = (folder / RESPONSES).is_file()
                console.print(f"{name}: {'done before' if done else 'runs'}, {folder}", highlight=False, soft_wrap=True)
                if not done:
                    validate(checkpoint, model, command, folder)
                found[name] = read(folder / RESPONSES, n)
    except Stopped as stopped:
        typer.echo("stopped; rerun to resume")
        raise typer.Exit(stopped.exit_code) from None
    rows, problems = compare(found), len(found[name])
    figures = {name: {key: figure._asdict() for key, figure in row.items()} for name, row in rows.items()}
    report = {"asked": words, "sampling": sampling, "problems": problems, "figures": figures}
    write_atomically(output / "eval.json", (json.dumps(report, indent=1) + "\n").encode())
    table = Table(f"{problems} problems", *rows[name])
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()))
    console.print(table)
    console.print(f"written: {output}/eval.json", highlight=False, soft_wrap=True)


# ---- one validation ----


def _digest(*values: Any) -> str:
    """Of weights and words in the names of folders: what is in one is what is asked for."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]


def configuration(checkpoint: Checkpoint, folder: Path) -> Path | None:
    """Write the run's configuration into ``folder``, or None where the checkpoint has none.

    verl resolves a configuration before the trainer can keep it. Here the interpolations of the recipe's defaults are
    put back wherever they give what was kept, so that an override reaches all that follow its key.
    """
    if checkpoint.config is None:
        return None
    kept, defaults = OmegaConf.load(checkpoint.config), compose([])
    for key, text in _interpolations(OmegaConf.to_container(defaults, resolve=False)):
        then = OmegaConf.select(kept, key, default=_ABSENT)
        if then is not _ABSENT:
            OmegaConf.update(kept, key, text, merge=False)
            with suppress(OmegaConfBaseException):
                if OmegaConf.select(kept, key) == then:
                    continue
            OmegaConf.update(kept, key, then, merge=False)
    file = folder / "config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, OmegaConf.to_yaml(kept).encode())
    return file


_ABSENT = object()


def _interpolations(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _interpolations(value, f"{key}.{name}".lstrip("."))
    elif isinstance(node, str) and "${" in node:
        yield key, node


def recipe_words(kept: Path | None, precision: Precision, sampling: dict[str, Any], model: Path) -> list[str]:
    """What the recipe is started with to validate ``model``, the checkpoint's weights, and to train nothing."""
    words = []
    if kept is not None:
        words = ["--config-path", str(kept.parent), "--config-name", kept.stem]
    words += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
    # One KV cache for all that are compared: a run's own would be another in each row.
    flashrl: dict[str, Any] = {"precision": precision.value, "kv_cache": "auto", "failed_responses_max": 0}
    if precision is Precision.BF16:
        flashrl["ignore"] = []
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    keys = {
        **{f"flashrl.{key}": value for key, value in flashrl.items()},
        **{f"{rollout}.val_kwargs.{key}": value for key, value in sampling.items()},
        "actor_rollout_ref.model.path": quoted(str(model)),
        "trainer.val_only": True,
        "trainer.val_before_train": True,
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.save_freq": -1,
        "trainer.logger": ["console"],
        # verl checks the training's batches too, and loads its data: the least that any number of GPUs can cut.
        "data.train_files": "${data.val_files}",
        "data.train_batch_size": "${trainer.n_gpus_per_node}",
        f"{actor}.ppo_mini_batch_size": "${trainer.n_gpus_per_node}",
        f"{rollout}.n": "${trainer.nnodes}",
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 1 << 20,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        "algorithm.filter_groups.enable": False,
    }
    for key, value in keys.items():
        listed = f"[{','.join(map(quoted, value))}]" if isinstance(value, list) else value
        words.append(f"++{key}={listed if isinstance(listed, str) else json.dumps(listed)}")
    return words


def validate(checkpoint: Checkpoint, model: Path, words: list[str], folder: Path) -> None:
    """Merge into ``model`` and run verl's validation; its dump becomes ``RESPONSES`` when it is whole."""
    if not model.exists():
        from flashrl_verl.tools.export.merge import merge

        merge(checkpoint, model)
    folder.mkdir(parents=True, exist_ok=True)
    log, paths = folder / LOG, os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "recipe" / "flashrl" / "main_flashrl.py"), *words]
    command.append(f"++trainer.validation_data_dir={quoted(str(folder / 'dump'))}")
    began = time.monotonic()
    tree = ProcessTree(command, log, {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}, Path.cwd())
    try:
        with new_console().status("starts") as status:  # nothing where no person looks
            while (code := tree.poll()) is None:
                status.update(f"{time.monotonic() - began:.0f} s: {last_line(log)[:120]}")
                time.sleep(1.0)
    finally:
        tree.end()
    dumped = sorted((folder / "dump").glob("*.jsonl"))
    if code or not dumped:
        error = "\n".join(last_error(log.read_text(errors="replace")))
        raise FlashRLError(f"verl's validation failed (exit code {code}): {error}\nThe whole log: {log}")
    os.replace(dumped[-1], folder / RESPONSES)
    shutil.rmtree(folder / "dump")


# ---- what the dumps say ----


def read(file: Path, n: int) -> Values:
    """What verl's validation dumped, by problem: ``acc`` where the reward gives it, else ``score``, as in verl's own
    figures. Copies of a problem count as one with more responses.

    Raises:
        FlashRLError: a prompt has not n responses.
    """
    found: Values = {}
    for row in map(json.loads, file.read_text().splitlines()):
        value = row["score"] if row.get("acc") is None else row["acc"]
        found.setdefault((row["input"], str(row["gts"])), []).append(float(value))
    if short := sum(len(values) % n > 0 for values in found.values()):
        raise FlashRLError(f"{file}: {short} prompts lack responses ({n} each): see {LOG}, remove the file, and rerun")
    return found


def compare(found: dict[str, Values]) -> dict[str, dict[str, Figure]]:
    """Figures by name, and below them their differences to the first's, in pairs by problem."""
    from flashrl_verl.tools.intervals import interval, per_problem

    first, *others = found
    if odd := [other for other in others if found[other].keys() != found[first].keys()]:
        raise FlashRLError(f"{odd[0]} and {first} answered different problems: other data, or another chat template")
    n = min(len(own) for values in found.values() for own in values.values())
    columns = {name: per_problem([values[key] for key in found[first]], n) for name, values in found.items()}
    rows = {name: {key: interval(column) for key, column in own.items()} for name, own in columns.items()}
    for other in others:
        gaps = {key: column - columns[first][key] for key, column in columns[other].items()}
        rows[f"{other} - {first}"] = {key: interval(gap, floor=-1.0) for key, gap in gaps.items()}
    return rows
