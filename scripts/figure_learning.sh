#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# FlashRL's learning figure: reinforcement learning on chains of sums, BF16, INT8 and FP8 rollouts with and without TIS, three
# seeds each, and the accuracy of all last weights in one BF16 engine. A step takes 6 to 9 s with six runs on an H200: by estimate
# forty minutes on one GPU, and fifteen on four with FIGURE_RUNS=18. The same command goes on after a stop (exit code 3: time was
# over first, and it says how much is left); every start costs some three minutes, so that short pieces train little.
#
#   bash scripts/figure_learning.sh [words for flashrl bench learning]
#
#   FIGURE_OUTPUT=outputs/learning   runs, learning.json, learning.png
#   FIGURE_ARMS=bf16:none,...        precisions with their correction; more may be added to the same folder
#   FIGURE_SEEDS=0,1,2               seeds of each arm; likewise
#   FIGURE_RUNS=6                    runs at a time, spread over the GPUs; by estimate three or four cores each
#   FIGURE_MINUTES=60                for everything
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
help_if_asked "$@"
cd "$root"

python -m benchmarks learning --arm "${FIGURE_ARMS:-bf16:none,bf16:tis,int8:none,int8:tis,fp8:none,fp8:tis}" \
  --seed "${FIGURE_SEEDS:-0,1,2}" --steps 60 --parallel "${FIGURE_RUNS:-6}" --minutes "${FIGURE_MINUTES:-60}" \
  --output "${FIGURE_OUTPUT:-outputs/learning}" trainer.test_freq=20 "$@"
