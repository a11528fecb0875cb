#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Published data sets as parquet files for verl; `flashrl data` is the same command.

python scripts/prepare_data.py dapo-math-17k        # data/dapo-math-17k.parquet
python scripts/prepare_data.py aime-2024            # data/aime-2024.parquet
python scripts/prepare_data.py gsm8k                # data/gsm8k-train.parquet, data/gsm8k-test.parquet
python scripts/prepare_data.py gsm8k --source FOLDER --tokenizer Qwen/Qwen2.5-0.5B-Instruct
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from flashrl_verl.errors import environment_needed  # noqa: E402

with environment_needed():
    import typer

    from flashrl_verl.cli import run
    from flashrl_verl.tools.data import data

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(data)

if __name__ == "__main__":
    run(app)
