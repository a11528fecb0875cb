#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh checkout to a trained toy model and its report, with or without a GPU.
#
#   bash scripts/quickstart.sh [--seed N] [--output DIR] [--resume] [hydra.key=value ...]
#
#   FLASHRL_VENV           where the environment is (default: <repository>/.venv)
#   FLASHRL_SKIP_SETUP=1   use the current environment as it is
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=python
if [ "${FLASHRL_SKIP_SETUP:-0}" != 1 ]; then
  bash scripts/setup_env.sh
  python=${FLASHRL_VENV:-$root/.venv}/bin/python
fi

# exec: a signal for this script reaches the program that knows how to end the training.
exec "$python" -m flashrl_verl.cli quickstart "$@"
