# SPDX-License-Identifier: Apache-2.0
"""A run that only counts: it logs, saves every second step and goes on from there as the recipe does, in milliseconds.

For what ``flashrl bench learning`` does with its runs, whatever these are. Words: its folder, steps, seconds a step,
and the step at which it fails (0: never); with a fifth word it fails the first time only.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

KEY = "val-core/toy_chain/acc/mean@2"


def main() -> None:
    folder, steps, seconds, fails_at, *once = sys.argv[1:]
    folder, steps, seconds, fails_at = Path(folder), int(steps), float(seconds), int(fails_at)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
    metrics, latest = (
        Path(os.environ["VERL_FILE_LOGGER_PATH"]),
        folder / "checkpoints" / "latest_checkpointed_iteration.txt",
    )
    latest.parent.mkdir(exist_ok=True)
    start = int(latest.read_text()) if latest.is_file() else 0
    kept = [line for line in _lines(metrics) if json.loads(line)["step"] <= start] if start else []
    metrics.write_text("".join(kept))
    (folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    print(f"starts at {start}", flush=True)
    with metrics.open("a", buffering=1) as log:
        log.write(json.dumps({"step": start, "data": {KEY: 0.25}}) + "\n")
        for step in range(start + 1, steps + 1):
            time.sleep(seconds / 2)
            failed = folder / "failed"
            if step == fails_at and not (once and failed.is_file()):
                failed.touch()
                raise ValueError(f"step {step} is not to be")
            if step % 2 == 0:
                latest.write_text(str(step))
            time.sleep(seconds / 2)  # verl logs a step after it has saved, with a validation in between
            data = {"rollout_corr/k3_kl": 1e-4 * step, "timing_s/step": 2.0}
            log.write(json.dumps({"step": step, "data": data | ({KEY: 0.5} if step == steps else {})}) + "\n")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


if __name__ == "__main__":
    main()
