#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up the environment and runs the tests of a machine without a GPU.
#
#   bash scripts/test.sh [--slow] [words for pytest]
#
#   (nothing)              everything but the markers gpu and slow
#   --slow                 everything that needs no GPU
#   FLASHRL_SKIP_SETUP=1   use the python of the current environment as it is
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
help_if_asked "$@"
cd "$root"

selection="not gpu and not slow"
workers=2
if [ "${1:-}" = --slow ]; then
  selection="not gpu"
  workers=0 # whole runs of the recipe, each of which needs the machine
  shift
fi

python=python
if [ "${FLASHRL_SKIP_SETUP:-0}" != 1 ]; then
  bash scripts/setup_env.sh
  python=${FLASHRL_VENV:-$root/.venv}/bin/python
fi

# Tests make their own models: nothing is fetched, nothing is reported anywhere, plots need no display.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 MPLBACKEND=Agg TOKENIZERS_PARALLELISM=false
# Two at a time, each file's tests in one process, whose fixtures are made once; the long ones of e2e first.
exec "$python" -m pytest -n $workers --dist loadfile --no-loadscope-reorder -m "$selection" --durations=15 --durations-min=5 "$@"
