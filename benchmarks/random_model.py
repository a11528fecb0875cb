# SPDX-License-Identifier: Apache-2.0
"""Short runs of the recipe on nothing that is downloaded: a model of random weights with a tokenizer of its whole
vocabulary, of a real model's width and of any depth; prompts; overrides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart.progress import LOG, METRICS, follow
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import Stopped, stoppable
from flashrl_verl.tools.recipe_process import quoted
from flashrl_verl.tools.report import read_metrics

EOS, PAD = 0, 1
PROMPT_TOKENS = 120
"""Letters and what stands behind each, a byte a token."""


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``size`` tokens: bytes, so that it reads everything (a newline is one token, as verl wants), and
    words that are only ever written."""
    words = ["<eos>", "<pad>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"\u0120w{number}" for number in range(size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )


def make_model(model: str, layers: int | None, folder: Path) -> None:
    """Random BF16 weights and a tokenizer, made once.

    Args:
        model: a name of ``SHAPES``, or a folder with a config.json.
        layers: decoder layers, where it is not all of them.
        folder: for a Hugging Face checkpoint.
    """
    if (folder / "tokenizer.json").is_file():  # what is saved last
        return
    config = load_config(model)
    if layers is not None:
        if layers > config.num_hidden_layers:
            raise ConfigError(f"--layers {layers}: {model} has {config.num_hidden_layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    config.eos_token_id, config.pad_token_id, config.bos_token_id = EOS, PAD, None
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    made.save_pretrained(folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)


def make_prompts(source: str, prompts: int, folder: Path) -> None:
    """`train.parquet`: prompts of 60 random letters in verl's columns.

    Args:
        source: what verl chooses a reward by.
        prompts: how many.
        folder: is there.
    """
    draw = random.Random(0)
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": " ".join(draw.choices("abcdefghij", k=PROMPT_TOKENS // 2))}],
            "ability": "MATH",
            "reward_model": {"style": "rule", "ground_truth": "34"},
            "extra_info": {"index": str(number)},
        }
        for number in range(prompts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


def short_run(model: Path, folder: Path, steps: int) -> list[str]:
    """Hydra's words of a run on these prompts that validates and saves nothing."""
    data = quoted(str(folder / "train.parquet"))
    return [
        f"actor_rollout_ref.model.path={quoted(str(model))}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.filter_overlong_prompts=false",
        f"trainer.default_local_dir={quoted(str(folder / 'checkpoints'))}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
    ]


def train(
    command: Sequence[str], folder: Path, steps: int, variables: Mapping[str, str] | None = None
) -> dict[int, dict[str, float]]:
    """Run the recipe and show how it goes.

    Args:
        command: one that starts it.
        folder: takes train.log and metrics.jsonl.
        steps: how many it is to make.
        variables: of its environment, beside this process's.

    Returns:
        What verl logged, by step.

    Raises:
        FlashRLError: it ended before its last step.
        SystemExit: it was stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, metrics = folder / LOG, folder / METRICS
    for file in (log, metrics):
        file.unlink(missing_ok=True)
    with stoppable():
        try:
            code = follow(command, folder, steps, Console(), variables)
        except Stopped as stopped:
            raise SystemExit(stopped.exit_code) from None
    rows = read_metrics(metrics).rows if metrics.is_file() else {}
    if code or max(rows, default=0) < steps:
        raise FlashRLError("\n".join([f"exit code {code}; log: {log}", *last_error(log.read_text(errors="replace"))]))
    return rows
