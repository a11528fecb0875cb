# SPDX-License-Identifier: Apache-2.0
"""Learning curves of RL by precision of the rollout and correction of the mismatch, over seeds.

    python -m benchmarks.learning --variants bf16+tis,int8+tis --seeds 0,1,2 --outliers 32 --steps 60 --parallel 6

Every (variant, seed) is the recipe in a process of its own: ``experiment=chain``, from one warmed-up toy model. A seed
gives the order of the prompts and vLLM's seed, the same in every variant. Runs share a GPU, or a CPU: each takes
about 12 GiB of the host's memory and 1,700 threads. Before the deadline they are stopped just behind a checkpoint; the
same command resumes them, on another machine too: the folder of six toy runs is some 40 MiB. When all have made their
last step, the last weights are merged, and Transformers answers the held-out chains with them in BF16, so that variants
differ in what was trained, not in who is asked.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.common import environment, interval, show, words_of, write_json
from benchmarks.common import run as run_command
from benchmarks.gsm8k import EXTRAS, SCORE, variant_overrides, visible_gpus
from benchmarks.toy.chain import ChainConfig, compute_score
from benchmarks.toy.outliers import OutlierConfig
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart.assets import MANIFEST, AssetsConfig, make_assets
from flashrl_verl.quickstart.model import ToyModelConfig
from flashrl_verl.quickstart.warmup import WarmupConfig
from flashrl_verl.tools import recipe_process
from flashrl_verl.tools.export.checkpoint import find
from flashrl_verl.tools.export.merge import merge
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import ProcessTree
from flashrl_verl.tools.report import read_metrics

CHAIN = ChainConfig()
MODEL = ToyModelConfig(num_layers=3, rope_theta=1000.0)
"""The quickstart's with a layer more: half a million parameters, so that a checkpoint is 6 MB. The base of the rotary
embedding is for sequences of 100 tokens instead of 17."""
WARMUP = WarmupConfig(
    target_accuracy=0.34,
    max_steps=6000,
    batch_size=256,
    probe_every=20,
    lr=3e-3,
    matrix_lr=5e-3,
    lr_warmup_steps=50,
)
"""A perfect reckoner that forgets 0.6 of its borrows samples 0.37 of the chains right. AdamW alone took 800 updates to
0.30 and jumped; Muon takes 480."""

HOST_GIB = 12.0
"""Of a run on a GPU. Where all runs together have more than 95 % of the host's memory, Ray kills their workers."""
UNFINISHED = 3
"""Exit code where time was over first: rerun to resume."""
ENDING_S = 25.0
"""Of the deadline, kept for ending processes and for the report."""
PATIENCE = ((signal.SIGINT, 12.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 3.0))
"""How runs are ended within it: signals, and seconds to wait after each."""
CLOSING_S = 20.0
"""Before that: a run that has just saved a step is stopped, as it might not reach its next checkpoint."""
START_S = 200.0
"""With less than this left nothing is started: start-up alone takes two minutes where runs share the cores."""
SAMPLES, ANSWER = 8, 128
"""Answers to each held-out chain when the last weights are asked, and tokens of one at most."""
SERIES = {
    "k3_kl": "rollout_corr/k3_kl",
    "effective_sample_size": "rollout_corr/rollout_is_eff_sample_size",
    "truncated_share": "rollout_corr/rollout_is_ratio_fraction_high",
    "step_seconds": "timing_s/step",
}
"""Of every step: name in ``learning.json``, and verl's."""


@dataclass(eq=False)
class Run:
    """One variant with one seed, in a folder of its own."""

    variant: str
    seed: int
    folder: Path
    steps: int
    process: ProcessTree | None = None
    gpu: str | None = None
    log_start: int = 0
    stopped: bool = False
    failures: int = 0
    """Since this command began."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant} seed {self.seed}"

    @property
    def saved(self) -> int:
        """Step of the last whole checkpoint; 0: none."""
        with suppress(OSError, ValueError):
            return int((self.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        return 0

    @property
    def trained(self) -> bool:
        """Whether its last step is saved."""
        return self.saved >= self.steps

    def rows(self) -> dict[int, dict[str, float]]:
        """What verl logged, by step."""
        with suppress(FlashRLError):  # nothing yet
            return read_metrics(self.folder / "metrics.jsonl").rows
        return {}

    @property
    def final_bf16(self) -> float | None:
        """Score of the last weights, asked in BF16; None: not asked yet."""
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "final_bf16.json").read_text())["score"]
        return None

    def start(self, words: Sequence[str], gpu: str | None) -> None:
        """Start the recipe with its overrides, on a GPU in the words of ``CUDA_VISIBLE_DEVICES`` (None: on all)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        env = recipe_process.environment(self.folder / "metrics.jsonl")
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        log = self.folder / "train.log"
        self.log_start = log.stat().st_size if log.is_file() else 0
        command = [sys.executable, "-m", recipe_process.MODULE, *words]
        self.process, self.gpu = ProcessTree(command, log, env, recipe_process.ROOT), gpu
        self.stopped = False

    def error(self) -> str:
        """What a person needs of its log."""
        log = (self.folder / "train.log").read_bytes()[self.log_start :]
        return "\n".join(last_error(log.decode(errors="replace")))


def scores(rows: dict[int, dict[str, float]]) -> dict[int, float]:
    """Validation score by step."""
    return {step: row[key] for step, row in sorted(rows.items()) for key in row if SCORE.fullmatch(key)}


# ---- what a run is ----


def run_overrides(this: Run, assets: Path, hardware: str, kv_cache_bytes: int, overrides: Sequence[str]) -> list[str]:
    """The recipe's words for a run.

    Args:
        this: the run.
        assets: folder of model and data.
        hardware: ``cuda`` or ``cpu``.
        kv_cache_bytes: on a GPU.
        overrides: the user's; they win.
    """
    words = [
        "experiment=chain",
        f"hardware={hardware}",
        *variant_overrides(this.variant),
        f"chain.assets={recipe_process.quoted(str(assets))}",
        f"trainer.default_local_dir={recipe_process.quoted(str(this.folder / 'checkpoints'))}",
        f"trainer.total_training_steps={this.steps}",
        f"data.seed={this.seed}",
        f"actor_rollout_ref.rollout.seed={this.seed}",
        "trainer.save_freq=2",
        "trainer.test_freq=20",
    ]
    if hardware == "cuda":
        # Given, not measured: vLLM stops where another run frees memory while it measures.
        key = "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
        words.append(f"{key}={kv_cache_bytes}")
    words += overrides
    if this.saved:
        words.append("trainer.val_before_train=false")  # it was asked before it was stopped
    return words


# ---- when it runs ----


class Schedule:
    """Carries out runs until all are trained or time is over.

    Args:
        runs: all that are wanted.
        parallel: at a time.
        end: by ``time.monotonic``: then nothing runs any more.
        overrides: of a run as it is.
        tell: takes a line for people.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        parallel: int,
        end: float,
        overrides: Callable[[Run], list[str]],
        tell: Callable[[str], None],
    ):
        self.runs, self.parallel, self.end, self.overrides, self.tell = runs, parallel, end, overrides, tell
        # What has begun first: its checkpoint is worth more than another beginning.
        self.waiting = sorted((r for r in runs if not r.trained), key=lambda r: not r.saved)
        self.going: list[Run] = []
        self.next_start = self.next_word = 0.0
        self.gpus = visible_gpus()

    def carry_out(self) -> None:
        """Nothing runs when it returns or raises."""
        try:
            while self.going or self.waiting:
                left = self.end - time.monotonic()
                if left <= 0 or (not self.going and left < START_S):
                    break
                self._start(left)
                self._collect()
                if left < CLOSING_S:
                    self._stop_saved()
                self._say(left)
                time.sleep(min(1.0, max(0.0, left)))
        finally:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda run: run.process.end(PATIENCE), self.going))
            for run in self.going:
                run.stopped = True
            self._collect()

    def _start(self, left: float) -> None:
        now = time.monotonic()
        if not self.waiting or len(self.going) >= self.parallel or now < self.next_start or left < START_S:
            return
        run = self.waiting.pop(0)
        # Importing torch, vLLM and verl keeps a core busy, and two Rays must not look for ports at once.
        self.next_start = now + max(3.0, 160.0 / (os.cpu_count() or 1))
        run.start(self.overrides(run), min(self.gpus, key=[run.gpu for run in self.going].count))
        self.going.append(run)
        self.tell(f"{run.name}: " + (f"from step {run.saved}" if run.saved else "started"))

    def _collect(self) -> None:
        for run in [run for run in self.going if run.process.poll() is not None]:
            self.going.remove(run)
            prune(run)
            if run.trained:
                self.tell(f"{run.name}: trained")
            elif run.stopped:
                self.tell(f"{run.name}: stopped, resumes from step {run.saved}")
            else:
                run.failures += 1
                self.tell(f"{run.name}: failed, log in {run.folder}\n{run.error()}")
                if run.failures < 2:  # a port may have been taken, or memory
                    self.waiting.append(run)

    def _stop_saved(self) -> None:
        for run in self.going:
            # verl saves a step before it logs it: stopped in between, the step's figures would be lost.
            if not run.stopped and 0 < run.saved < run.steps and run.saved == max(run.rows(), default=-1):
                run.stopped = True
                run.process.interrupt()

    def _say(self, left: float) -> None:
        if time.monotonic() < self.next_word or not self.going:
            return
        self.next_word = time.monotonic() + 20.0
        steps = ", ".join(f"{run.name} {max(run.rows(), default='starts')}" for run in self.going)
        more = f", {left / 60:.1f} minutes left" if math.isfinite(left) else ""
        self.tell(f"{len(self.waiting)} waiting{more}; at step: {steps}")


def prune(run: Run) -> None:
    """Keep the newest checkpoint alone; of a run that is trained, no optimizer state."""
    for folder in (run.folder / "checkpoints").glob("global_step_*"):
        if folder.name != f"global_step_{run.saved}":
            shutil.rmtree(folder, ignore_errors=True)
    if run.trained:
        for file in (run.folder / "checkpoints").rglob("optim_*.pt"):
            file.unlink()


# ---- what it came to ----


def ask(run: Run, chains: Path, device: str) -> None:
    """Have the last weights answer the held-out chains in BF16 at temperature 1, and keep their score.

    Args:
        run: a trained one.
        chains: parquet file of verl's rows.
        device: of PyTorch.
    """
    import pyarrow.parquet
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = run.folder / "weights"
    if not weights.exists():
        merge(find(run.folder), weights)
    tokenizer = AutoTokenizer.from_pretrained(weights, padding_side="left")
    # The weights are BF16; most CPUs compute in it slowly.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype).to(device)
    rows = [row for row in pyarrow.parquet.read_table(chains).to_pylist() for _ in range(SAMPLES)]
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    prompts = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").to(device)
    torch.manual_seed(0)
    out = model.generate(**prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=ANSWER)
    answers = tokenizer.batch_decode(out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [
        compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["acc"]
        for row, answer in zip(rows, answers, strict=True)
    ]
    write_json(run.folder / "final_bf16.json", {"score": statistics.fmean(right), "answers": len(right)})


def collect(runs: Sequence[Run], settings: dict[str, Any], environments: list[dict[str, str]]) -> dict[str, Any]:
    """``learning.json``."""
    records = []
    for run in runs:
        rows = dict(sorted(run.rows().items()))
        series = {}
        for name, key in SERIES.items():
            logged = {step: row[key] for step, row in rows.items() if key in row}
            series[name] = {"step": list(logged), "value": list(logged.values())}
        curve = scores(rows)
        series["score"] = {"step": list(curve), "value": list(curve.values())}
        last = max(rows, default=0)
        records.append(
            {"variant": run.variant, "seed": run.seed, "step": last, "final_bf16": run.final_bf16, "series": series}
        )
    return {"settings": settings, "environments": environments, "runs": records}


def by_variant(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of a record, in its order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        found.setdefault(run["variant"], []).append(run)
    return found


def differences(record: dict[str, Any]) -> dict[str, list[float]]:
    """Final score in BF16 of every variant but the first, minus the first's of the same seed."""
    variants = by_variant(record)
    base = {run["seed"]: run["final_bf16"] for run in next(iter(variants.values()))}
    return {
        variant: [
            run["final_bf16"] - base[run["seed"]]
            for run in runs
            if run["final_bf16"] is not None and base.get(run["seed"]) is not None
        ]
        for variant, runs in list(variants.items())[1:]
    }


HEADER = (
    "variant",
    "asked",
    "final, BF16",
    "minus the first",
    "final, own engine",
    "mean of curve",
    "k3 KL, mean (largest)",
    "s/step",
)


def table(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row a variant, in ``HEADER``'s columns; ± is half of a 95 % interval over seeds."""

    def mean(values: Sequence[float], sign: str = "") -> str:
        if not values:
            return "-"
        middle, half = interval(values)
        return f"{middle:{sign}.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")

    rows, minus = [], differences(record)
    for variant, runs in by_variant(record).items():
        kl = [value for run in runs for value in run["series"]["k3_kl"]["value"]]
        seconds = [value for run in runs for value in run["series"]["step_seconds"]["value"]]
        finals = [run["final_bf16"] for run in runs if run["final_bf16"] is not None]
        steps = record["settings"]["steps"]
        own = [dict(zip(*run["series"]["score"].values(), strict=True)).get(steps) for run in runs]
        rows.append(
            (
                variant,
                f"{len(finals)}/{len(runs)}",
                mean(finals),
                mean(minus.get(variant, []), "+"),
                mean([value for value in own if value is not None]),
                mean([statistics.fmean(run["series"]["score"]["value"]) for run in runs if run["step"] == steps]),
                f"{statistics.fmean(kl):.1e} ({max(kl):.1e})" if kl else "-",
                f"{statistics.median(seconds):.1f}" if seconds else "-",
            )
        )
    return rows


def plot(record: dict[str, Any], path: Path) -> None:
    """Score by step (a line a run, its BF16 end a dot), and k3 KL by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    for number, (variant, runs) in enumerate(by_variant(record).items()):
        for index, run in enumerate(runs):
            look = {"color": f"C{number}", "label": variant if index == 0 else None}
            left.plot(run["series"]["score"]["step"], run["series"]["score"]["value"], **look, alpha=0.8)
            right.plot(run["series"]["k3_kl"]["step"], run["series"]["k3_kl"]["value"], **look, linewidth=0.8)
            if run["final_bf16"] is not None:
                left.plot([record["settings"]["steps"]], [run["final_bf16"]], "o", color=f"C{number}", clip_on=False)
    left.set(xlabel="step", ylabel="held-out score (own engine; dots: BF16)", ylim=(0, 1))
    right.set(xlabel="step", ylabel="k3 KL of rollout and trainer", yscale="log")
    left.legend(frameon=False)
    figure.savefig(path)


# ---- the command ----


def keep_settings(output: Path, settings: dict[str, Any]) -> list[dict[str, str]]:
    """Compare what all runs of a folder share with what is there, and write it; returns the environments so far.

    Raises:
        ConfigError: the folder has runs of other settings.
    """
    file = output / "settings.json"
    there = json.loads(file.read_text()) if file.is_file() else {"settings": settings, "environments": []}
    if there["settings"] != settings:
        old = there["settings"]
        keys = dict.fromkeys([*settings, *old])
        other = [f"{k}={old.get(k)} (now {settings.get(k)})" for k in keys if old.get(k) != settings.get(k)]
        raise ConfigError(f"{output} has runs with {'; '.join(other)}. Name another --output, or remove it")
    if (here := environment()) not in there["environments"]:
        there["environments"].append(here)
    write_json(file, there)
    return there["environments"]


def make_model(output: Path, outliers: int | None, hardware: str, tell: Callable[[str], None]) -> Path:
    """The toy model and the chains that all runs start from, made once; returns their folder.

    Raises:
        ConfigError: runs have begun, and what they started from is gone.
    """
    import torch

    root = output / "assets"
    if any(output.glob("*/metrics.jsonl")):
        # Not compared with what would be made here: a model made anew, by another torch too, is another one.
        if not (root / MANIFEST).is_file():
            raise ConfigError(f"{root} is gone, from which the runs started. Put it back, or name another --output")
        return root
    last = -1.0

    def probed(step: int, accuracy: Any) -> None:
        nonlocal last
        if time.monotonic() - last > 10.0:
            last = time.monotonic()
            tell(f"warm-up: update {step}, score {accuracy.sampled:.3f} of {WARMUP.target_accuracy}")

    planted = OutlierConfig(factor=outliers) if outliers else None
    config = AssetsConfig(seed=0, task=CHAIN, model=MODEL, warmup=WARMUP, outliers=planted)
    make_assets(root, config, on_probe=probed, device=hardware)
    if hardware == "cuda":
        torch.cuda.empty_cache()
    return root


def learning(
    context: typer.Context,
    variants: Annotated[
        str, typer.Option(help=f"precision+correction[+{'|'.join(EXTRAS)}],...: differences are to the first.")
    ] = "bf16+tis,int8+tis",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a run.")] = 60,
    outliers: Annotated[
        int | None, typer.Option(help="Make two channels of every layer so many times as large, a power of two.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time, spread over the visible GPUs.")] = 1,
    deadline: Annotated[float | None, typer.Option(help="Minutes; then runs are stopped. Rerun to resume.")] = None,
    kv_cache_mib: Annotated[int, typer.Option(min=64, help="KV cache of a run on a GPU, MiB.")] = 512,
    output: Annotated[Path, typer.Option(help="Folder; carry it to another machine to resume there.")] = Path(
        "outputs/learning"
    ),
) -> None:
    """Learning curves on chains of sums by precision and correction, over seeds.

    Words after the options are Hydra overrides of every run. Exit code 0: all runs are trained and asked in BF16.
    3: not all yet, rerun to resume. 1: a run failed twice.
    """
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    import torch

    names = words_of(variants, None, "--variants")
    numbers = words_of(seeds, None, "--seeds")
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--seeds {seeds!r} is not a list of numbers from 0, such as 0,1,2")
    for name in names:
        variant_overrides(name)
    for word in context.args:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(f"{word!r} is neither an option (--help) nor an override key=value")
    parallel = min(parallel, len(names) * len(numbers))
    if parallel > 1 and parallel > (most := int(psutil.virtual_memory().available / 2**30 // HOST_GIB)):
        raise ConfigError(f"--parallel {parallel}: a run takes {HOST_GIB:.0f} GiB of memory; here is room for {most}")
    output = output.expanduser().resolve()
    output.mkdir(parents=True, exist_ok=True)
    hardware = "cuda" if torch.cuda.is_available() else "cpu"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{output} is in use by another command. Wait for it, or name another --output") from None
        settings = {"steps": steps, "outliers": outliers, "overrides": list(context.args)}
        environments = keep_settings(output, settings)
        assets = make_model(output, outliers, hardware, tell)
        runs = [
            Run(variant=name, seed=int(number), folder=output / f"{name}-seed{number}", steps=steps)
            for number in numbers
            for name in names
        ]

        def overrides(this: Run) -> list[str]:
            return run_overrides(this, assets, hardware, kv_cache_mib * 2**20, context.args)

        end = math.inf if deadline is None else began + 60 * deadline - ENDING_S
        code = 0
        try:
            Schedule(runs, parallel, end, overrides, tell).carry_out()
            for run in runs:
                if run.trained and run.final_bf16 is None and time.monotonic() < end:
                    ask(run, assets / "test.parquet", hardware)
                    tell(f"{run.name}: score {run.final_bf16:.3f} in BF16")
        except KeyboardInterrupt:
            code = 130
        finally:  # of what there is, if a run cannot be asked too
            report(runs, settings, environments, output)
    left = [run for run in runs if run.final_bf16 is None]
    if code == 0 and left:
        code = 1 if any(run.failures > 1 for run in left) else UNFINISHED
    if left:
        tell(f"{len(left)} of {len(runs)} runs are not finished. Rerun to resume.")
    raise typer.Exit(code)


def report(runs: Sequence[Run], settings: dict[str, Any], environments: list[dict[str, str]], output: Path) -> None:
    """Write ``learning.json`` and ``learning.png``, and print the table."""
    record = collect(sorted(runs, key=lambda run: run.seed), settings, environments)
    write_json(output / "learning.json", record)
    with suppress(ImportError):  # matplotlib may not be there
        plot(record, output / "learning.png")
    show("± is half of a 95 % interval over seeds", HEADER, table(record))
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file()) / 2**20
    print(f"{output}: learning.json, learning.png; {size:.0f} MiB in all")


if __name__ == "__main__":
    run_command(learning, overrides=True)
