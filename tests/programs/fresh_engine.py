# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint into an engine of its own process, without sleep mode, and prints what it samples as one line of
JSON.

Arguments: model folder, precision, JSON list of prompts (lists of token ids).
"""

import json
import sys

from engines import engine, greedy


def main(path: str, precision: str, prompts: str) -> None:
    with engine(path, {"precision": precision}, compiled=True, load_format="safetensors") as llm:
        result = [greedy(llm, tuple(prompt)) for prompt in json.loads(prompts)]
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
