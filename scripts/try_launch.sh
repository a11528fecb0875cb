#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a launch script for three steps on the GPUs of this machine: the model's own width and vocabulary, fewer layers, random
# weights, random prompts. Nothing is downloaded.
#
#   bash scripts/try_launch.sh EXPERIMENT [--layers N] [--response N] [--steps N] [--output DIR] [hydra.key=value ...]
#
#   EXPERIMENT    of recipe/flashrl/run_EXPERIMENT.sh, such as dapo_qwen2.5_32b_int8
#   --layers N    decoder layers (default: 4)
#   --response N  tokens of every response: random weights never end one (default: 2048, or the experiment's, if shorter)
#   --steps N     training steps (default: 3)
#   --output DIR  model, data, log and metrics (default: outputs/try/EXPERIMENT)
#   --dry-run     make and start nothing; print what is changed, and the script's own dry run
#
# What it changes of the experiment is printed first: parallelism and batch for the GPUs that are there, paths, no filter (a random
# model is never right), no validation, no checkpoint. Your own overrides come last and win.
#
#   FLASHRL_VENV           where the environment is (default: <repository>/.venv, made by setup_env.sh)
#   FLASHRL_SKIP_SETUP=1   use the current environment as it is
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
help_if_asked "$@"

if [ "${FLASHRL_SKIP_SETUP:-0}" != 1 ]; then
  bash "$root/scripts/setup_env.sh"
  export PATH="${FLASHRL_VENV:-$root/.venv}/bin:$PATH" # the launch script runs python3
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec python3 "$root/scripts/try_launch.py" "$@"
