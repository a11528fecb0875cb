# SPDX-License-Identifier: Apache-2.0
"""What a run of ``flashrl bench learning`` tells the recipe, and what is refused of it before anything is made."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.legacy_learning.learning import ASSETS, CHOSEN, LearningConfig, Run, environment
from flashrl_verl.errors import ConfigError
from benchmarks.legacy_learning.tools import kept_config
from benchmarks.legacy_learning.tools.engines.visible_gpus import visible_gpus
from benchmarks.legacy_learning.tools.recipe_process import MODULE, compose, quoted
from benchmarks.legacy_learning.tools.run_directory import CONFIG_FILE, MAY_CHANGE

if TYPE_CHECKING:
    from omegaconf import DictConfig


_KV_CACHE_BYTES = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"

_OF_THE_RUN = {
    **{key: CHOSEN[key] for key in ("flashrl.precision", "data.seed", "actor_rollout_ref.rollout.seed")},
    "flashrl.bf16_replica_fraction": "leave it out, an arm has one precision",
    "algorithm.rollout_correction": "--arm, with a preset of your own in flashrl_verl/configs/correction",
    **{key: CHOSEN[key] for key in ("trainer.total_training_steps", "trainer.default_local_dir", "chain.assets")},
    "trainer.resume_mode": CHOSEN["trainer.resume_mode"],
}
"""Keys of the recipe, with all below them, that make a run what its name says, and what they are chosen by."""


def training_overrides(config: LearningConfig, run: Run) -> list[str]:
    """The words after `python -m recipe.flashrl.main_flashrl` for one run."""
    return [*_chosen(config, run), *config.overrides]


def _chosen(config: LearningConfig, run: Run) -> list[str]:
    """Those that the bench gives."""
    words = [
        "experiment=chain",
        f"hardware={config.hardware}",
        f"flashrl.precision={run.arm.precision.value}",
        f"correction={run.arm.correction}",
        f"chain.assets={quoted(str(config.output / ASSETS))}",
        f"trainer.default_local_dir={quoted(str(run.folder / 'checkpoints'))}",
        f"trainer.total_training_steps={config.steps}",
        f"data.seed={run.seed}",
        f"actor_rollout_ref.rollout.seed={run.seed}",
    ]
    if config.hardware == "cuda":
        # Given, not measured: vLLM stops where another run frees memory while it measures.
        size = round(config.kv_cache_gib * 2**30)
        words.append(f"+{_KV_CACHE_BYTES}={size}")
    return words


def compose_run(config: LearningConfig, run: Run) -> DictConfig:
    """The configuration that the recipe will see.

    Raises:
        ConfigError: it contradicts itself, or an override takes away what this bench reads, or what the run's name says
            of it.
    """
    from flashrl_verl.validation import validate_config

    composed = compose(training_overrides(config, run))
    if config.overrides:
        _require_run(composed, compose(_chosen(config, run)), run)
    validate_config(composed)
    trainer = composed.trainer
    if "file" not in trainer.logger or trainer.test_freq < 1:
        raise ConfigError(
            f"trainer.logger={trainer.logger}, trainer.test_freq={trainer.test_freq}: curves are read from verl's file "
            "logger and need validation. Remedy: `file` among the loggers, and test_freq from 1 on"
        )
    if trainer.save_freq < 1:
        raise ConfigError(
            f"trainer.save_freq={trainer.save_freq} saves nothing: neither to go on from nor to be evaluated. "
            "Remedy: leave it out, or from 1 on"
        )
    return composed


def _require_run(composed: DictConfig, expected: DictConfig, run: Run) -> None:
    """Refuse overrides, however they are written, that make of a run another than its name says.

    Args:
        composed: with the overrides.
        expected: without them.
        run: whose they are.

    Raises:
        ConfigError: one changes what the bench chooses.
    """
    there, here = kept_config.as_kept(expected), kept_config.as_kept(composed)
    changed = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    for name in changed:
        for key, remedy in _OF_THE_RUN.items():
            if name == key or name.startswith(f"{key}."):
                raise ConfigError(
                    f"an override gives {run.name} {name}={here.get(name)} (it is {there.get(name)}), which this bench "
                    f"chooses. Remedy: {remedy}"
                )


def facts_of(config: LearningConfig, run: Run, composed: DictConfig) -> dict[str, Any]:
    """What a run's record says of it, in the words of the quickstart's, so that `flashrl report` can read both."""
    from omegaconf import OmegaConf

    return {
        "hardware": f"{environment(config.hardware)['device']}, up to {config.parallel} runs at a time"
        + _over(len(gpus(config))),
        "precision": run.arm.precision.value,
        "correction": OmegaConf.to_container(composed.algorithm.rollout_correction, resolve=True),
        "seed": run.seed,
        "total_steps": config.steps,
    }


def gpus(config: LearningConfig) -> tuple[str, ...]:
    """GPUs that runs are spread over, in the names of ``CUDA_VISIBLE_DEVICES``; none where a run has all, or there are
    none."""
    if config.hardware != "cuda" or compose_run(config, config.runs()[0]).trainer.n_gpus_per_node > 1:
        return ()
    return visible_gpus()


def _over(count: int) -> str:
    return f" over {count} GPUs" if count > 1 else ""


def preparation(config: LearningConfig) -> Callable[[Run], tuple[list[str], dict[str, Any], DictConfig]]:
    """What a start of a run needs: the words of its command, the facts of its record, its configuration."""

    def prepare(run: Run) -> tuple[list[str], dict[str, Any], DictConfig]:
        composed = compose_run(config, run)
        words = training_overrides(config, run)
        command = shlex.join(["python", "-m", MODULE, *words])
        return [sys.executable, "-m", MODULE, *words], {"command": command, **facts_of(config, run, composed)}, composed

    return prepare


def check_arms(config: LearningConfig) -> None:
    """Compose one run of every arm: whatever can be refused is, before anything is made.

    Raises:
        ConfigError: see ``compose_run``; also when a run of the folder was begun with other settings, as by an older
            release.
    """
    runs = config.runs()
    for arm in config.arms:
        of_arm = [run for run in runs if run.arm == arm]
        composed = compose_run(config, of_arm[0])
        if config.overrides and len(of_arm) > 1:
            compose_run(config, of_arm[-1])  # one that sets a seed may set the first's
        for run in of_arm:
            if changed := _begun_otherwise(config, run, composed):
                raise ConfigError(
                    f"{run.name} in {config.output} was begun with other settings: {'; '.join(changed)}. "
                    "Name another folder in --output, or remove it"
                )


def _begun_otherwise(config: LearningConfig, run: Run, composed: DictConfig) -> list[str]:
    """What a run was begun with and would not go on with, apart from where it lies.

    Args:
        config: of the bench.
        run: whose folder is looked at.
        composed: of any run of its arm.
    """
    file = run.folder / CONFIG_FILE
    if not file.is_file():
        return []
    new = kept_config.as_kept(composed) | dict.fromkeys(("data.seed", "actor_rollout_ref.rollout.seed"), run.seed)
    paths = tuple(key for key, value in new.items() if str(value).startswith(f"{config.output}/"))
    return kept_config.different(kept_config.load(file), new, (*MAY_CHANGE, _KV_CACHE_BYTES, *paths))
