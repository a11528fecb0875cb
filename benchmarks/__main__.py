# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks NAME`` is ``python -m benchmarks.NAME``."""

import runpy
import sys

NAMES = {
    "learning": "learning curves of a small model by precision and correction, over seeds",
    "rollout": "generation speed and KV cache of a model's shape, by variant",
    "mismatch": "how far each precision's log-probs are from the trainer's",
    "refit": "seconds of a weight update",
    "step": "whole steps of DAPO by lever, a run of the recipe each",
    "training": "seconds of old log-probs and policy updates",
    "tables": "write every table of docs/results and the README",
}


def main() -> None:
    """Run one, or say which there are."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in NAMES:
        sys.argv[1:] = sys.argv[2:]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        return
    print("Benchmarks; each has --help:\n" + "\n".join(f"  {key:11} {about}" for key, about in NAMES.items()))
    sys.exit(0 if name in ("-h", "--help") else f"there is no benchmark {name!r}")


if __name__ == "__main__":
    main()
