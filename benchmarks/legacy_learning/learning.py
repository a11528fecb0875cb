# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench learning``: learning curves of RL by precision of the rollout and correction of the mismatch, over
seeds.

Every run is the recipe in a process of its own, `experiment=chain`, from the same warmed-up model; a seed gives the
order of the prompts and vLLM's seed, the same in every arm. Runs share a machine, and are done in pieces: when time is
over they are ended; the same command goes on from their checkpoints.
"""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import flashrl_verl
from flashrl_verl.errors import ConfigError
from benchmarks.legacy_learning.quickstart.assets import Assets, AssetsConfig, made_before, make_assets
from benchmarks.legacy_learning.quickstart.chain import ChainConfig
from benchmarks.legacy_learning.quickstart.model import ToyModelConfig
from benchmarks.legacy_learning.quickstart.outliers import OutlierConfig
from benchmarks.legacy_learning.quickstart.warmup import Accuracy, WarmupConfig
from flashrl_verl.settings import Precision
from benchmarks.legacy_learning.tools.report.run import METRICS_FILE
from benchmarks.legacy_learning.tools.run_directory import MAY_CHANGE
from benchmarks.legacy_learning.tools.software import software
from flashrl_verl.trainer.atomic_write import write_whole

SETTINGS = "settings.json"
"""What all runs of a folder have in common, and where they run."""
RUNS, ASSETS = "runs", "assets"
CORRECTIONS = Path(flashrl_verl.__file__).parent / "configs" / "correction"

CHOSEN = {
    **dict.fromkeys(("precision", "flashrl.precision", "correction"), "--arm"),
    **dict.fromkeys(("data.seed", "actor_rollout_ref.rollout.seed"), "--seed"),
    "trainer.total_training_steps": "--steps",
    "hardware": "--hardware",
    "experiment": "leave it out, the task is the chain",
    **dict.fromkeys(("trainer.default_local_dir", "chain.assets"), "--output"),
    "trainer.resume_mode": "leave it out, runs go on from their last checkpoint",
}
"""Keys that are no overrides here, and what is in their place."""

_LASTING = ("trainer.test_freq", "trainer.val_before_train")
"""May change between the attempts of a run elsewhere; here the mean of a curve is that of its validations."""

CHAIN = ChainConfig()

STEP_TOKENS, RESPONSE_TOKENS = len("52-38=14;"), 128
"""Of a worked step, and of the longest response in `experiment=chain`."""

MODEL = ToyModelConfig(num_layers=3, rope_theta=1000.0)
"""The quickstart's with a layer more: half a million parameters, so that a checkpoint (12 bytes a parameter) is 6 MB
and those of several runs can be carried from one machine to the next. The base is for sequences of 100 tokens instead
of 17."""

WARMUP = WarmupConfig(target_accuracy=0.34, max_steps=6000, batch_size=256, probe_every=20, lr_warmup_steps=50)
"""A perfect reckoner that forgets 0.6 of its borrows samples 0.37 of the chains right. Rates are the quickstart's."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is compared: precision of the rollout, and correction of the mismatch."""

    precision: Precision
    correction: str
    """A file of `configs/correction`."""

    def __str__(self) -> str:
        return f"{self.precision.value}:{self.correction}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    arm: Arm
    seed: int
    folder: Path
    """Of its log, metrics, record and checkpoints."""

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """What to run."""

    output: Path
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    """Of RL, in every run."""
    parallel: int
    """Runs at a time."""
    minutes: float
    """For everything, the ending of what runs included; the warm-up is not stopped."""
    hardware: str
    """``cuda`` or ``cpu``: a file of `configs/hardware`."""
    kv_cache_gib: float
    """Each run's KV cache on a GPU. 512 sequences of 192 tokens of the default model take 0.07 GiB, 768 bytes a
    token."""
    model_seed: int = 0
    """Of the initial weights, the chains and the warm-up."""
    model: ToyModelConfig = MODEL
    chain: ChainConfig = CHAIN
    warmup: WarmupConfig = WARMUP
    outliers: OutlierConfig | None = None
    """Channels of the model with which INT8 is further from the trainer; None: as it was warmed up."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides of every run; they win over what is set here."""

    def __post_init__(self) -> None:
        for option, chosen in (("--arm", self.arms), ("--seed", self.seeds)):
            if not chosen:
                raise ConfigError(f"{option} names none: give one or more, separated by commas")
            if len(set(chosen)) < len(chosen):
                raise ConfigError(f"{option} names one twice: leave it out once")
        longest = STEP_TOKENS * self.chain.steps + 4  # "#", two digits and the end of the turn
        if longest > RESPONSE_TOKENS:
            raise ConfigError(
                f"a chain of {self.chain.steps} steps is worked out in up to {longest} tokens, and experiment=chain "
                f"has {RESPONSE_TOKENS} (data.max_response_length). Remedy: --chain-steps "
                f"{(RESPONSE_TOKENS - 4) // STEP_TOKENS}"
            )
        for word in self.overrides:
            if (key := word.lstrip("+~").partition("=")[0]) in CHOSEN:
                raise ConfigError(f"{word}: this bench chooses {key}. Remedy: {CHOSEN[key]}")

    def runs(self) -> list[Run]:
        """All of them, the first seed of every arm first: what is there when time is over can be compared."""
        names = [
            (arm, seed, f"{arm.precision.value}-{arm.correction}-seed{seed}")
            for seed in self.seeds
            for arm in self.arms
        ]
        return [Run(arm=arm, seed=seed, folder=self.output / RUNS / name) for arm, seed, name in names]


def arms_of(words: str) -> tuple[Arm, ...]:
    """Read ``--arm``: precision:correction, separated by commas.

    Raises:
        ConfigError: there is no such precision or correction.
    """
    arms = []
    for word in filter(None, map(str.strip, words.split(","))):
        precision, _, correction = word.partition(":")
        there = {
            "precision": [p.value for p in Precision],
            "correction": sorted(p.stem for p in CORRECTIONS.glob("*.yaml")),
        }
        for what, given in (("precision", precision), ("correction", correction)):
            if given not in there[what]:
                raise ConfigError(f"--arm {word!r}: {given!r} is no {what}; there are {', '.join(there[what])}")
        arms.append(Arm(precision=Precision(precision), correction=correction))
    return tuple(arms)


def seeds_of(words: str) -> tuple[int, ...]:
    """Read ``--seed``: numbers from 0, separated by commas.

    Raises:
        ConfigError: one is none.
    """
    seeds = [word for word in map(str.strip, words.split(",")) if word]
    if not all(word.isdecimal() for word in seeds):
        raise ConfigError(f"--seed {words!r} is not a list of numbers from 0, such as 0,1,2")
    return tuple(map(int, seeds))


def check_settings(config: LearningConfig) -> None:
    """Compare what all runs of the folder share with what is there, if anything is.

    Raises:
        ConfigError: the folder has runs of other settings, versions or another device, or cannot be read.
    """
    file, here = config.output / SETTINGS, shared(config)
    if not file.is_file():
        return
    remedy = "Name another folder in --output, or remove it"
    try:
        there = {part: dict(values) for part, values in json.loads(file.read_text()).items()}
        there["settings"]["overrides"] = lasting(there["settings"]["overrides"])
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{file} holds no settings ({type(error).__name__}: {error}). {remedy}") from error
    other = [
        f"{key} ({json.dumps(there.get(part, {}).get(key))}, now {json.dumps(value)})"
        for part, values in here.items()
        for key, value in values.items()
        if there.get(part, {}).get(key) != value
    ]
    if other:
        raise ConfigError(f"{config.output} has runs of another {', '.join(other)}. {remedy}")


def write_settings(config: LearningConfig) -> None:
    """Write down what all runs of the folder share, once the model is made: where that fails, other settings may be
    tried."""
    write_whole(config.output / SETTINGS, (json.dumps(shared(config), indent=1) + "\n").encode())


def lasting(overrides: Sequence[str]) -> list[str]:
    """Without those that may differ between the attempts of a run: how long, how often saved, where to, how fast."""

    def may_change(word: str) -> bool:
        key = word.lstrip("+~").partition("=")[0]
        return key not in _LASTING and any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)

    return [word for word in overrides if not may_change(word)]


def shared(config: LearningConfig) -> dict[str, Any]:
    """Settings and environment that two runs have to share to stand in one picture. Arms and seeds may be added
    later."""
    settings = asdict(config)
    for name in ("output", "arms", "seeds", "parallel", "minutes", "kv_cache_gib"):
        del settings[name]
    settings["overrides"] = lasting(config.overrides)
    return json.loads(json.dumps({"settings": settings, "environment": environment(config.hardware)}))


@functools.cache
def environment(hardware: str) -> dict[str, str]:
    """Versions and device."""
    import torch

    device = torch.cuda.get_device_name() if hardware == "cuda" else f"CPU ({platform.machine()})"
    return software() | {"device": device}


def make(config: LearningConfig, on_probe: Callable[[int, Accuracy], None] | None = None) -> Assets:
    """The model and the data that all runs start from, made once: on the GPU where the runs are.

    Raises:
        FlashRLError: the warm-up did not reach its target.
        ConfigError: the model that the runs of this folder started from is gone.
    """
    import torch

    asked = AssetsConfig(
        seed=config.model_seed, task=config.chain, model=config.model, warmup=config.warmup, outliers=config.outliers
    )
    begun = list((config.output / RUNS).glob(f"*/{METRICS_FILE}"))
    if begun and made_before(config.output / ASSETS, asked) is None:
        raise ConfigError(
            f"{config.output / ASSETS} is not whole, or not what {begun[0].parent.name} started from: a model made "
            "anew need not be the same. Put it back, or name another folder in --output"
        )
    assets = make_assets(config.output / ASSETS, asked, on_probe=on_probe, device=config.hardware)
    if config.hardware == "cuda":
        torch.cuda.empty_cache()  # the runs have the memory
    return assets
