# SPDX-License-Identifier: Apache-2.0
"""What the runs of ``flashrl bench learning`` came to: their last weights, and those they started from, in one BF16
engine.

    python -m benchmarks.legacy_learning.learning_bf16 JOB.json ANSWER.json

A run's own validation asks its own engine, quantized where the arm is: two arms would then differ in what is trained
and in what is asked (docs/evaluation.md). The pieces are those of ``flashrl eval``; the engine is the rollout's in
BF16, whose weights are updated from one checkpoint to the next.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.legacy_learning.learning import ASSETS, LearningConfig, Run
from benchmarks.legacy_learning.learning_run import checkpoint_of
from flashrl_verl.errors import FlashRLError
from benchmarks.legacy_learning.tools.data.source import sha256
from benchmarks.legacy_learning.tools.engines import process as engine_process
from benchmarks.legacy_learning.tools.engines.child import drop_prefix_cache, run_child
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig

FILE = "bf16.json"
"""In a run's folder, and of the start in the folder of all."""
MODEL = "model"
"""A finished run's last weights in its folder: BF16, Hugging Face's layout."""

SAMPLES = 8
START_S = 60.0
"""Seconds until the engine is there, on an H200."""
MODEL_S = 12.0
"""Seconds to ask one model, on an H200: 8 to 13."""
LEAST_S = START_S + 5 * MODEL_S
"""With less time left no engine is started: its start would be paid for a few models."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the engine is to do."""

    models: list[tuple[str, str]]
    """Folder of the weights, and the file that gets the figures."""
    tokenizer: str
    """Folder of a model whose tokenizer and template are everyone's."""
    data: str
    max_tokens: int
    temperature: float
    top_p: float
    max_num_seqs: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Nothing: the figures are in the models' files."""


class TimeOver(Exception):
    """The time was over before all were asked."""


def left_over(config: LearningConfig, finished: Sequence[Run]) -> list[tuple[Path, Path]]:
    """What has not been asked yet: folders of weights, and the files that get the figures."""
    start = (config.output / ASSETS / "model", config.output / FILE)
    runs = [(run.folder / MODEL, run.folder / FILE) for run in finished]
    return [pair for pair in (start, *runs) if not pair[1].is_file()]


def models_left(models: int, hardware: str) -> str:
    """Of a command that did not ask them all, in words; how long it takes, where that has been measured."""
    minutes = math.ceil((START_S + models * MODEL_S) / 60)
    estimate = f", by estimate {minutes} minutes" if hardware == "cuda" else ""
    return f"{models} model{'s are' if models > 1 else ' is'} to be asked in BF16{estimate}"


def keep_weights(run: Run, steps: int) -> None:
    """Write a finished run's last weights in BF16, once: a sixth of its checkpoint, which has FP32 and Adam's moments,
    and all that is asked for later.

    Raises:
        FlashRLError: there is no checkpoint of its last step, or it is damaged.
    """
    from benchmarks.legacy_learning.tools.export.export import Request, export

    if (run.folder / MODEL).is_dir():
        return
    step = checkpoint_of(run.folder)
    if step != steps:
        what = f"its last checkpoint is of step {step}" if step else "it has no checkpoint"
        raise FlashRLError(f"{run.name} is finished at step {steps}, and {what}. {_remedy(run)}")
    checkpoint = run.folder / "checkpoints" / f"global_step_{step}"
    if not checkpoint.is_dir():
        raise FlashRLError(f"{run.name} is finished, and {checkpoint} is gone. {_remedy(run)}")
    export(Request(checkpoint=checkpoint, output=run.folder / MODEL))


def _remedy(run: Run) -> str:
    return f"Put it back, or remove {run.folder} to train it again"


def ask(config: LearningConfig, composed: DictConfig, pairs: Sequence[tuple[Path, Path]], seconds: float) -> None:
    """Run the engine in a process of its own; what is done when it is ended stays done.

    Args:
        config: of the bench.
        composed: a run's configuration: how its validation samples.
        pairs: see ``left_over``.
        seconds: until it is ended.

    Raises:
        TimeOver: they were over.
        FlashRLError: the engine failed; the message has its error and the log's path.
    """
    rollout, over = composed.actor_rollout_ref.rollout, time.monotonic() + seconds
    job = Job(
        models=[(str(model), str(file)) for model, file in pairs],
        tokenizer=str(config.output / ASSETS / "model"),
        data=str(config.output / ASSETS / "test.parquet"),
        max_tokens=composed.data.max_response_length,
        temperature=rollout.val_kwargs.temperature,
        top_p=rollout.val_kwargs.top_p,
        max_num_seqs=rollout.max_num_seqs,
        seed=config.model_seed,
    )

    def meanwhile() -> None:
        if time.monotonic() > over:
            raise TimeOver

    engine_process.ask(
        "benchmarks.legacy_learning.learning_bf16", "bf16", asdict(job), config.output, title="the BF16 engine", meanwhile=meanwhile
    )


# ---- in the engine's process ----


def work(job: Job, folder: Path) -> Answer:
    """Ask one model after another, and write each one's figures."""
    from flashrl_verl.settings import Precision
    from benchmarks.legacy_learning.tools.engines.mismatch_engine import update_from
    from benchmarks.legacy_learning.tools.evaluate import engine
    from benchmarks.legacy_learning.tools.evaluate.evaluate import EvalConfig, prompts_of
    from benchmarks.legacy_learning.tools.evaluate.problems import read_problems
    from benchmarks.legacy_learning.tools.export.source import open_checkpoint

    # `flashrl eval` refuses what these words cannot be.
    config = EvalConfig(
        checkpoint=Path(job.tokenizer),
        data=(Path(job.data),),
        samples=SAMPLES,
        temperature=job.temperature,
        top_p=job.top_p,
        max_tokens=job.max_tokens,
        seed=job.seed,
    )
    problems, _ = read_problems(config.data)
    prompts, stops, tokenizer = prompts_of(open_checkpoint(config.checkpoint), problems, config)
    asked = engine.Job(
        model=job.tokenizer,
        precision=Precision.BF16.value,
        layers={},
        prompts=prompts,
        samples=SAMPLES,
        temperature=job.temperature,
        top_p=job.top_p,
        max_tokens=job.max_tokens,
        seed=job.seed,
        stop_token_ids=stops,
        vocab_size=len(tokenizer),
        tensor_parallel_size=1,
    )
    facts = {"precision": asked.precision, "data": sha256(Path(job.data)), "samples": SAMPLES}
    facts |= {name: getattr(job, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    llm = _start(job, asked)
    for model, file in job.models:
        llm.collective_rpc(update_from, args=(model, 1))
        drop_prefix_cache(llm)
        responses = engine.generate(llm, asked, folder / "bf16.progress")
        texts = [tokenizer.decode(response.token_ids, skip_special_tokens=True) for response in responses]
        write_whole(Path(file), (json.dumps(facts | figures_of(problems, texts, job.seed)) + "\n").encode())
    (folder / "bf16.progress").unlink(missing_ok=True)
    return Answer()


def figures_of(problems: Sequence[Any], texts: Sequence[str], seed: int) -> dict[str, Any]:
    """Accuracy with its interval over chains, and how many of each chain's responses are right.

    Args:
        problems: the chains.
        texts: ``SAMPLES`` responses to each, in their order.
        seed: of the interval's draws.
    """
    import numpy as np

    from benchmarks.legacy_learning.quickstart.reward import compute_score
    from benchmarks.legacy_learning.tools.evaluate.metrics import figures, per_problem
    from benchmarks.legacy_learning.tools.evaluate.scoring import score

    asked = [problem for problem in problems for _ in range(SAMPLES)]
    values = np.array(
        [score(compute_score, problem, text) for problem, text in zip(asked, texts, strict=True)]
    ).reshape(-1, SAMPLES)
    columns = per_problem(values, 1.0)
    found = dict(zip(columns, map(asdict, figures(list(columns.values()), seed)), strict=True))
    return {"metrics": found, "right": values.sum(axis=1).astype(int).tolist()}


def _start(job: Job, asked: Any) -> Any:
    from flashrl_verl.platforms.cores import bind_ranks
    from flashrl_verl.plugins.versions import vllm_device
    from flashrl_verl.settings import FlashRLConfig, Precision
    from benchmarks.legacy_learning.tools.engines.arms import Arm
    from benchmarks.legacy_learning.tools.engines.child import start
    from benchmarks.legacy_learning.tools.engines.mismatch_engine import require_formats
    from benchmarks.legacy_learning.tools.evaluate.engine import whole_prompts

    longest, arguments = max(map(len, asked.prompts)) + job.max_tokens, {}
    if vllm_device() != "cuda":
        arguments = whole_prompts(longest)
        bind_ranks(1)
    llm = start(
        job.tokenizer,
        FlashRLConfig(precision=Precision.BF16),
        in_process=True,  # the weight update reaches the model without crossing another border
        load_format="dummy",  # every weight comes by an update
        enforce_eager=True,  # graphs take longer to capture than they save here
        max_model_len=longest,
        max_num_seqs=job.max_num_seqs,
        seed=job.seed,
        **arguments,
    )
    (layers,) = llm.collective_rpc("flashrl_layers")
    require_formats(Arm(precision=Precision.BF16), layers, "evaluation in")
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": asked.vocab_size})  # as verl's server does
    return llm


if __name__ == "__main__":
    run_child(Job, work)
