#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A whole step of DAPO-32B by part and precision: old log-probs and policy updates timed on this machine's GPU (some layers of the
# shape, two minutes), and the step that `flashrl plan` computes from its own constants.
#
#   bash scripts/figure_step.sh [words for flashrl plan]
#
#   FIGURE_OUTPUT=outputs/step   training.json, step.png, step.json
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
help_if_asked "$@"
cd "$root"

output=${FIGURE_OUTPUT:-outputs/step}
python -m benchmarks training --model qwen2.5-32b --layers 2,6 --tokens 8192 --hardware cuda \
  --output "$output"
python -m flashrl_verl plan experiment=dapo_qwen2.5_32b_int8 --gpu h200 --gpus 64 --figure "$output/step.png" \
  --json "$output/step.json" "$@"
