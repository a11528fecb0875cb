# SPDX-License-Identifier: Apache-2.0
"""Everything a toy run trains with, in one directory: model, tokenizer, data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.model import build_model
from flashrl_verl.quickstart.task import split_problems, verl_rows
from flashrl_verl.quickstart.tokenizer import build_tokenizer
from flashrl_verl.quickstart.warmup import evaluate, warm_up

RECORD = "assets.json"
"""Written last: where it is, the others are whole."""


def make_assets(root: Path, *, seed: int, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Make `model` (in Hugging Face's layout, with tokenizer), `train.parquet` and `test.parquet` (in verl's), or use
    those of an earlier call with the same seed.

    Args:
        root: the directory.
        seed: of the initial weights, the split, and the warm-up's order.
        tell: takes lines of progress.

    Returns:
        `seed`, `warmup_steps`, and the BF16 model's accuracies `greedy` and `sampled` on the test problems.

    Raises:
        ConfigError: `root` holds those of another seed.
        FlashRLError: the warm-up did not reach its target.
    """
    if (root / RECORD).is_file():
        made = json.loads((root / RECORD).read_text())
        if made["seed"] != seed:
            raise ConfigError(f"{root} was made with --seed {made['seed']}. Remedy: that seed, or another --output.")
        return made
    import pyarrow
    import pyarrow.parquet
    import torch
    from transformers.utils import logging

    root.mkdir(parents=True, exist_ok=True)
    split, tokenizer = split_problems(seed), build_tokenizer()
    for name, problems in (("train", split.train), ("test", split.test)):
        rows = verl_rows(problems, split=name)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / f"{name}.parquet")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums on machines of any size, and a busy core stalls nobody at a barrier
    try:
        model = build_model(tokenizer, seed=seed)
        steps = warm_up(model, tokenizer, split, seed=seed, tell=tell)
        logging.disable_progress_bar()  # for writing a file of a megabyte
        model.to(torch.bfloat16).save_pretrained(root / "model")
        tokenizer.save_pretrained(root / "model")
        # The rounded weights, evaluated without further rounding.
        made = {"seed": seed, "warmup_steps": steps, **evaluate(model.float(), tokenizer, split.test)._asdict()}
    finally:
        torch.set_num_threads(threads)
    (root / RECORD).write_text(json.dumps(made) + "\n")
    return made
