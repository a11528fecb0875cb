#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh checkout to a trained toy model and its report, with or without a GPU.
#
#   bash scripts/quickstart.sh [--seed N] [--steps N] [--output DIR] [--resume] [hydra.key=value ...]
#
#   --seed N     of the model, the data and their order (default: 0)
#   --steps N    of the training (default: 28)
#   --output DIR assets, log, metrics, checkpoints and report (default: outputs/quickstart); relative to where you are
#   --resume     resume from the last checkpoint of the run in DIR
#
# Environment:
#   FLASHRL_VENV           where the environment is (default: <repository>/.venv)
#   FLASHRL_SKIP_SETUP=1   use the current environment as it is
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

source "$root/scripts/lib.sh"
help_if_asked "$@"

python=python
if [ "${FLASHRL_SKIP_SETUP:-0}" != 1 ]; then
  bash "$root/scripts/setup_env.sh"
  python=${FLASHRL_VENV:-$root/.venv}/bin/python
fi

# No cd: a relative --output is the caller's. exec: a signal for this script reaches the program that can end the training.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m flashrl_verl quickstart "$@"
