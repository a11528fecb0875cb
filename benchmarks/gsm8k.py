# SPDX-License-Identifier: Apache-2.0
"""Does a pretrained model learn GSM8K with 8-bit rollouts as it does with BF16? Curves by variant, over seeds.

    flashrl data gsm8k-boxed
    python -m benchmarks.gsm8k --model models/Qwen2.5-Coder-0.5B-Instruct --variants bf16+tis,int8+tis --seeds 0,1

Every (variant, seed) is the recipe in a process of its own, one on a GPU at a time (``--per-gpu``). A seed gives the
order of the prompts and vLLM's seed, the same in every variant; variants of a seed run side by side. A run ends at its
last step or at the deadline. When all have ended, an engine in BF16 answers the test problems greedily with the last
weights that all runs of a seed have saved, so that variants differ neither in the engine that answers nor in the number
of steps. A run that failed has no say in which, and is evaluated too. Nothing is resumed, and weights that were
evaluated are not kept. A run of the recipe takes up to 20 GiB of the host's memory.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import environment, in_own_process, interval, show, words_of, write_json
from benchmarks.common import run as run_command
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.input_files import last_step
from flashrl_verl.settings import Precision
from flashrl_verl.tools import recipe_process
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import ProcessTree, Stopped, stoppable
from flashrl_verl.tools.report import read_metrics

EXTRAS = {
    "unrotated": "flashrl.rotation=false",
    "int8kv": "flashrl.kv_cache=int8_per_token_head",
    "async": "trainer.v1.trainer_mode=flashrl_colocate_async",
}
"""Words of a variant beside precision and correction."""
EVALUATION_S, EVALUATION_EACH_S = 90.0, 25.0
"""Of the deadline, kept for ending the runs and for evaluating them then: in all, and for each on a GPU."""
START_S = 240.0
"""With less than this left for training, no run is started."""
STAGGER_S = 4.0
"""Between two starts: two Rays must not look for ports at once."""
SCORE = re.compile(r"val-core/.*/acc/mean@\d+")
SERIES = {
    "k3_kl": "rollout_corr/k3_kl",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "response_length": "response_length/mean",
    "entropy": "actor/entropy",
    "step_s": "timing_s/step",
    "gen_s": "timing_s/gen",
    "old_log_prob_s": "timing_s/old_log_prob",
    "update_actor_s": "timing_s/update_actor",
}
"""Of every step: name in ``gsm8k.json``, and verl's."""


@dataclass(eq=False)
class Run:
    """One variant with one seed, in a folder of its own."""

    variant: str
    seed: int
    folder: Path
    steps: int
    bf16: tuple[int, float] | None = None
    """Step of the weights that were evaluated, and their accuracy in BF16."""
    problem: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant} seed {self.seed}"

    def saved(self) -> set[int]:
        """Steps of the whole checkpoints."""
        folder = self.folder / "checkpoints"
        last = last_step(folder) or 0  # verl writes it behind a checkpoint
        steps = {int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*")}
        return {step for step in steps if step <= last}

    def rows(self) -> dict[int, dict[str, float]]:
        """What verl logged, by step."""
        with suppress(FlashRLError):  # nothing yet
            return read_metrics(self.folder / "metrics.jsonl").rows
        return {}

    def train(self, words: Sequence[str], gpu: str | None, end: float, stop: threading.Event) -> None:
        """Run the recipe until its last step, or to the end by ``time.monotonic``, or until it is stopped."""
        self.folder.mkdir(parents=True)
        env, log = recipe_process.environment(self.folder / "metrics.jsonl"), self.folder / "train.log"
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        process = ProcessTree([sys.executable, "-m", recipe_process.MODULE, *words], log, env, recipe_process.ROOT)
        try:
            while process.poll() is None and time.monotonic() < end and not stop.is_set():
                time.sleep(0.5)
            if process.poll():
                self.problem = "\n".join(last_error(log.read_text(errors="replace")))
        finally:
            process.end()

    def evaluate(self, step: int, data: Path, gpu: str | None) -> None:
        """Measure the accuracy of a step's weights in BF16; the checkpoints go."""
        weights = self.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        self.bf16 = step, in_own_process(accuracy, str(weights), str(data), gpu, log=self.folder / "evaluate.log")
        shutil.rmtree(self.folder / "checkpoints")

    def record(self) -> dict[str, Any]:
        """Plain data, of a run that is not finished too."""
        rows = self.rows()
        series = {
            name: {"step": list(logged), "value": list(logged.values())}
            for name, key in SERIES.items()
            if (logged := {step: row[key] for step, row in rows.items() if key in row})
        }
        curve = {step: row[key] for step, row in rows.items() for key in row if SCORE.fullmatch(key)}
        series["score"] = {"step": list(curve), "value": list(curve.values())}
        step, score = self.bf16 or (None, None)
        found = {"variant": self.variant, "seed": self.seed, "step": max(rows, default=0), "problem": self.problem}
        return found | {"bf16_step": step, "bf16": score, "series": series}


def weights_to_evaluate(runs: Sequence[Run]) -> dict[Run, int]:
    """Steps of the last weights that all runs of a seed have, or else of a run's own last."""
    saved = {run: steps for run in runs if (steps := run.saved())}
    whole = {run: steps for run, steps in saved.items() if not run.problem}
    return {
        run: max(steps.intersection(*(of for other, of in whole.items() if other.seed == run.seed)) or steps)
        for run, steps in saved.items()
    }


def variant_overrides(variant: str) -> list[str]:
    """The recipe's words for a variant such as ``int8+int8kv+tis``.

    Raises:
        ConfigError: it is not one precision, one correction, and perhaps words of ``EXTRAS``.
    """
    corrections = (recipe_process.ROOT / "flashrl_verl" / "configs" / "correction").glob("*.yaml")
    words, chosen = variant.split("+"), {}
    kinds = {"precision": [p.value for p in Precision], "correction": sorted(path.stem for path in corrections)}
    for kind, known in kinds.items():
        found = [word for word in words if word in known]
        if len(found) != 1:
            raise ConfigError(f"--variants {variant!r} needs one {kind} of {', '.join(known)}, such as int8+tis")
        chosen[kind] = found[0]
    extras = [word for word in words if word not in chosen.values()]
    if rest := set(extras) - EXTRAS.keys():
        raise ConfigError(
            f"--variants {variant!r}: {', '.join(rest)} is no precision, no correction and none of {', '.join(EXTRAS)}"
        )
    fixed = [f"flashrl.precision={chosen['precision']}", f"correction={chosen['correction']}"]
    return [*fixed, *(EXTRAS[word] for word in extras)]


def run_overrides(this: Run, model: str, data: Path, test_every: int, kv_cache_bytes: int | None) -> list[str]:
    """The recipe's words for a run.

    Args:
        this: the run.
        model: folder.
        data: folder of ``flashrl data gsm8k-boxed``.
        test_every: steps between two validations, and two checkpoints.
        kv_cache_bytes: None: as much as fits.
    """
    quoted = recipe_process.quoted
    words = [
        "experiment=gsm8k_qwen2.5_0.5b_int8",
        *variant_overrides(this.variant),
        f"actor_rollout_ref.model.path={quoted(model)}",
        f"data.train_files={quoted(str(data / 'gsm8k-boxed-train.parquet'))}",
        f"data.val_files={quoted(str(data / 'gsm8k-boxed-test.parquet'))}",
        f"data.seed={this.seed}",
        f"actor_rollout_ref.rollout.seed={this.seed}",
        f"trainer.default_local_dir={quoted(str(this.folder / 'checkpoints'))}",
        f"trainer.total_training_steps={this.steps}",
        "trainer.total_epochs=1000",
        f"trainer.test_freq={test_every}",
        f"trainer.save_freq={test_every}",
        "trainer.max_actor_ckpt_to_keep=4",  # runs of a seed end at different steps
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    ]
    if kv_cache_bytes is not None:  # vLLM stops where another run frees memory while it measures
        rollout = "actor_rollout_ref.rollout"
        words.append(f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={kv_cache_bytes}")
        words.append(f"{rollout}.gpu_memory_utilization=0.05")
    return words


def accuracy(weights: str, data: str, gpu: str | None) -> float:
    """Share of the test problems that weights solve greedily in BF16, by verl's reward."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is looked at
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process of the engine's would keep this one from its end
    import pyarrow.parquet
    import torch
    import vllm
    from verl.utils.reward_score import default_compute_score

    rows = pyarrow.parquet.read_table(Path(data) / "gsm8k-boxed-test.parquet").to_pylist()
    if torch.cuda.is_available():  # given, not measured, as other runs may free memory
        room = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 8 << 30}
    else:  # a CPU would compile for a minute
        room = {"gpu_memory_utilization": 0.4, "enforce_eager": True}
    llm = vllm.LLM(weights, dtype="bfloat16", max_num_seqs=256, seed=0, **room)
    longest = llm.llm_engine.model_config.max_model_len
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=min(1024, longest // 2))
    outputs = llm.chat([row["prompt"] for row in rows], greedy, use_tqdm=False)
    return statistics.fmean(
        default_compute_score(row["data_source"], output.outputs[0].text, row["reward_model"]["ground_truth"])
        for row, output in zip(rows, outputs, strict=True)
    )


# ---- what it came to ----

HEADER = ("variant", "seeds", "steps", "first", "last, in BF16", "minus the first variant (pairs)")
HEADER += ("score, minus the first variant", "k3 KL first", "mean", "largest", "ESS", "s/step")


def validations(run: dict[str, Any]) -> dict[int, float]:
    """The run's own accuracies of trained weights by step, up to the weights that were evaluated in BF16."""
    curve, last = run["series"]["score"], run["bf16_step"] or math.inf
    return {step: value for step, value in zip(curve["step"], curve["value"], strict=True) if 0 < step <= last}


def bf16_accuracies(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Of the last weights of those runs that were evaluated in BF16."""
    return [run["bf16"] for run in runs if run["bf16"] is not None]


def pairs(records: Sequence[dict[str, Any]], variant: str, base: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A variant's runs, each with the base's of the same call with the same seed."""
    calls = [{(run["variant"], run["seed"]): run for run in record["runs"]} for record in records]
    return [
        (run, of[base, run["seed"]])
        for of in calls
        for run in of.values()
        if run["variant"] == variant and (base, run["seed"]) in of
    ]


def evaluated(of: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs whose last weights were both evaluated in BF16, after the same step."""
    return [pair for pair in of if len(bf16_accuracies(pair)) == 2 and len({run["bf16_step"] for run in pair}) == 1]


def scores(of: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[float, float]]:
    """Scores of pairs: the mean of the last three validations after steps at which both validated, and of the
    accuracies in BF16 where ``evaluated``. None of a pair with fewer validations."""
    found = []
    for pair in of:
        ours, theirs = map(validations, pair)
        both = [(ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys())][-3:]
        if len(both) == 3:
            both += [tuple(bf16_accuracies(one)) for one in evaluated([pair])]
            found.append(tuple(map(statistics.fmean, zip(*both, strict=True))))
    return found


def by_variant(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that validated thrice while they trained, or were evaluated in BF16."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in itertools.chain.from_iterable(record["runs"] for record in records):
        if run["series"]["score"]["value"] and (len(validations(run)) >= 3 or run["bf16"] is not None):
            found.setdefault(run["variant"], []).append(run)
    return found


def table(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row a variant, in ``HEADER``'s columns; ± is half of a 95 % interval over seeds."""

    def mean(values: Sequence[float], form: str = ".3f") -> str:
        if not values:
            return "-"
        middle, half = interval(values)
        return f"{middle:{form}}" + ("" if math.isnan(half) else f" ± {half:.3f}")

    variants = by_variant(records)
    base = records[0]["runs"][0]["variant"]
    rows = []
    for variant, runs in variants.items():
        paired = pairs(records, variant, base) if variant != base else []
        in_bf16 = [ours["bf16"] - theirs["bf16"] for ours, theirs in evaluated(paired)]
        by_score = [ours - theirs for ours, theirs in scores(paired)]
        of = {name: [run["series"][name]["value"] for run in runs if name in run["series"]] for name in SERIES}
        accuracies = bf16_accuracies(runs)
        kl, last = of["k3_kl"], sorted({run["bf16_step"] or max(validations(run)) for run in runs})
        logged = [*itertools.chain.from_iterable(kl)] or [math.nan]
        mismatch = statistics.fmean([values[0] for values in kl] or logged), statistics.fmean(logged), max(logged)
        rows.append(
            (
                variant,
                f"{len(runs)}",
                "-".join(map(str, dict.fromkeys((last[0], last[-1])))),
                mean([run["series"]["score"]["value"][0] for run in runs]),
                mean(accuracies) + (f" ({len(accuracies)})" if 0 < len(accuracies) < len(runs) else ""),
                *(f"{mean(gaps, '+.3f')} ({len(gaps)})" if gaps else "-" for gaps in (in_bf16, by_score)),
                *(f"{value:.1e}" for value in mismatch),
                f"{statistics.fmean(itertools.chain.from_iterable(of['ess'])):.4f}" if of["ess"] else "-",
                f"{statistics.median(itertools.chain.from_iterable(of['step_s'])):.1f}",
            )
        )
    return rows


PANELS = {
    "score": "accuracy, own engine (dots: BF16)",
    "k3_kl": "k3 KL of rollout and trainer",
    "response_length": "response length, tokens",
    "entropy": "entropy of the policy, nats",
}
"""Series by step."""


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy by step and by seconds of training, mismatch, response length, entropy: a thin line a run, and a thick
    one for the mean of a variant's runs, between their points too, over the steps that all of them have."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained", dpi=110)
    *by_step, by_seconds, names = figure.subplots(2, 3).flat
    variants: dict[str, list[dict[str, Any]]] = {}
    for run in itertools.chain.from_iterable(record["runs"] for record in records):
        if len(run["series"]["score"]["value"]) > 1:
            variants.setdefault(run["variant"], []).append(run)
    for at, (variant, runs) in enumerate(variants.items()):
        thin, thick = ({"color": f"C{at}", "linewidth": width, "alpha": alpha} for width, alpha in ((0.8, 0.5), (2, 1)))
        for axes, name in zip(by_step, PANELS, strict=True):
            of = [(curve["step"], curve["value"]) for run in runs if (curve := run["series"].get(name))]
            for curve in of:
                axes.plot(*curve, **thin)
            end = min((steps[-1] for steps, _ in of), default=0)
            common = sorted({step for steps, _ in of for step in steps if step <= end})
            axes.plot(common, np.mean([np.interp(common, *curve) for curve in of], axis=0) if of else [], **thick)
        for run in runs:
            of_steps = run["series"].get("step_s", {"step": [], "value": []})
            seconds = dict(zip(of_steps["step"], itertools.accumulate(of_steps["value"]), strict=True))
            score = run["series"]["score"]
            by_seconds.plot([seconds.get(step, 0.0) for step in score["step"]], score["value"], **thin)
            if run["bf16"] is not None:
                by_step[0].plot([run["bf16_step"]], [run["bf16"]], "o", markersize=4, color=f"C{at}")
        names.plot([], label=f"{variant}, seeds: {len(runs)}", **thick)
    for axes, label in zip(by_step, PANELS.values(), strict=True):
        axes.set(xlabel="step", ylabel=label)
    by_step[1].set(yscale="log")
    by_seconds.set(xlabel="seconds of training steps", ylabel="accuracy, own engine")
    names.legend(frameon=False, loc="center")
    names.axis("off")
    figure.savefig(path)


# ---- the command ----


def visible_gpus() -> list[str | None]:
    """In the words of ``CUDA_VISIBLE_DEVICES``; None: what this process sees."""
    import torch

    if not (count := torch.cuda.device_count()):
        return [None]
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")


def gsm8k(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of a pretrained model.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Folder that `flashrl data gsm8k-boxed` wrote.")] = Path("data"),
    variants: Annotated[
        str, typer.Option(help=f"precision+correction[+{'|'.join(EXTRAS)}],...: differences are to the first.")
    ] = "bf16+tis,int8+tis,int8+int8kv+tis",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a run.")] = 60,
    test_every: Annotated[int, typer.Option(min=1, help="Steps between two validations, and checkpoints.")] = 10,
    per_gpu: Annotated[int, typer.Option(min=1, help="Runs on a GPU at a time.")] = 1,
    kv_cache_gib: Annotated[float | None, typer.Option(help="KV cache of a run; needed with --per-gpu.")] = None,
    deadline: Annotated[float, typer.Option(help="Minutes; runs end before it with what they have saved.")] = math.inf,
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("outputs/gsm8k"),
) -> None:
    """Train a pretrained model on GSM8K by precision and correction, over seeds.

    Words after the options are Hydra overrides of every run. Exit code 1: a run has failed, or was not started.
    """
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    names, numbers = words_of(variants, None, "--variants"), words_of(seeds, None, "--seeds")
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--seeds {seeds!r} is not a list of numbers from 0, such as 0,1,2")
    for name in names:
        variant_overrides(name)
    if per_gpu > 1 and kv_cache_gib is None:
        raise ConfigError("--per-gpu needs --kv-cache-gib: what each run's engine may take")
    for word in context.args:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(f"{word!r} is neither an option (--help) nor an override key=value")
    folder, data, output = str(Path(model).expanduser().resolve()), data.expanduser().resolve(), output.resolve()
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"--model {model} is no folder with a config.json: download the model, and give its folder")
    if not (data / "gsm8k-boxed-test.parquet").is_file():
        raise ConfigError(f"--data {data} has no gsm8k-boxed-test.parquet: `flashrl data gsm8k-boxed` writes it")
    runs = [Run(name, int(number), output / f"{name}-seed{number}", steps) for number in numbers for name in names]
    recipe_process.compose([*run_overrides(runs[0], folder, data, test_every, None), *context.args])  # else none starts
    try:
        output.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{output} is there already. Name another --output, or remove it") from None
    settings = {"model": Path(folder).name, "steps": steps, "test_every": test_every, "per_gpu": per_gpu}
    settings |= {"overrides": context.args}
    here = environment()
    kv_cache_bytes = None if kv_cache_gib is None else int(kv_cache_gib * 2**30)
    stop, starting, keeping = threading.Event(), threading.Lock(), threading.Lock()
    gpus = visible_gpus()
    share = min(per_gpu, -(-len(runs) // len(gpus)))
    training_ends = began + 60 * deadline - EVALUATION_S - EVALUATION_EACH_S * -(-len(runs) // len(gpus))
    # A seed's runs are neighbours: what ends one GPU ends whole pairs.
    slots = [gpu for gpu in gpus for _ in range(share)]
    free, evaluations = list(slots), {}

    def carry_out(work: Callable[[Run, str | None], None], this: Run) -> None:
        gpu, before = free.pop(0), this.problem
        try:
            work(this, gpu)
        except Exception as error:  # of one run, which must not end the others
            this.problem = f"{type(error).__name__}: {error}"
        finally:
            free.append(gpu)
            if this.problem != before:
                tell(f"{this.name}: {this.problem} (logs: {this.folder})")

    def train(this: Run, gpu: str | None) -> None:
        with starting:
            if stop.is_set() or training_ends - time.monotonic() < START_S:
                this.problem = "not started: " + ("stopped" if stop.is_set() else "the deadline is too near")
                return
            time.sleep(STAGGER_S)
        tell(f"{this.name}: started on GPU {gpu}")
        words = run_overrides(this, folder, data, test_every, kv_cache_bytes)
        this.train([*words, *context.args], gpu, training_ends, stop)
        if not this.problem and (stop.is_set() or not this.saved()):
            this.problem = "stopped" if stop.is_set() else "ended before its first checkpoint"

    def evaluate(this: Run, gpu: str | None) -> None:
        if stop.is_set():
            return
        this.evaluate(evaluations[this], data, gpu)
        tell(f"{this.name}: {this.bf16[1]:.3f} in BF16 after {this.bf16[0]} steps")
        keep()

    def keep() -> dict[str, Any]:
        with keeping:
            record = {"settings": settings, "environment": here, "runs": [run.record() for run in runs]}
            write_json(output / "gsm8k.json", record)
        return record

    code = 0
    with stoppable():
        try:
            with ThreadPoolExecutor(len(slots)) as pool:

                def all_of(work: Callable[[Run, str | None], None], of: list[Run]) -> None:
                    going = [pool.submit(carry_out, work, run) for run in of]
                    while wait(going, timeout=20.0).not_done:
                        keep()
                        at = [f"{run.name} {max(run.rows(), default='starts')}" for run in of if run.folder.exists()]
                        tell(f"at step: {', '.join(at)}")

                try:
                    all_of(train, runs)
                    evaluations.update(weights_to_evaluate(runs))
                    all_of(evaluate, list(evaluations))
                finally:
                    stop.set()  # the pool waits for what is going
        except Stopped as stopped:
            code = stopped.exit_code
    record = keep()
    if rows := table([record]):
        with suppress(ImportError):  # matplotlib may not be there
            plot([record], output / "gsm8k.png")
        show("± is half of a 95 % interval over seeds", HEADER, rows)
    tell(f"written: {output / 'gsm8k.json'}")
    raise typer.Exit(code or int(any(run.problem for run in runs)))


if __name__ == "__main__":
    run_command(gsm8k, overrides=True)
