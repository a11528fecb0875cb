#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DAPO on Qwen2.5-32B with INT8 rollouts, 4 nodes x 8 GPUs. Every setting, with its source, is in
# flashrl_verl/configs/experiment/dapo_qwen2.5_32b_int8.yaml; words given here are Hydra overrides on top of it.
#
#   bash recipe/flashrl/run_dapo_qwen2.5_32b_int8.sh --dry-run        # print and check the configuration, start nothing
#   bash recipe/flashrl/run_dapo_qwen2.5_32b_int8.sh \
#       actor_rollout_ref.model.path=/shared/models/Qwen2.5-32B \
#       data.train_files=/shared/data/dapo-math-17k.parquet \
#       data.val_files=/shared/data/aime-2024.parquet \
#       trainer.default_local_dir=/shared/checkpoints/dapo-32b trainer.nnodes=4
#
# Paths have to be readable on every node; relative ones start at the directory that holds recipe/.
# Where it runs: on the Ray cluster of this machine, or, when RAY_JOB_ADDRESS (or an http:// RAY_ADDRESS) names a Ray
# dashboard, there through `ray job submit`. Both are Ray's own variables; nothing else is read from the environment.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command=(python3 -m recipe.flashrl.main_flashrl experiment=dapo_qwen2.5_32b_int8 "$@")

dashboard="${RAY_JOB_ADDRESS:-}"
if [[ -z "$dashboard" && "${RAY_ADDRESS:-}" == http* ]]; then
  dashboard="$RAY_ADDRESS"
fi
for word in "$@"; do
  if [[ "$word" == --dry-run ]]; then
    dashboard=""
  fi
done

if [[ -n "$dashboard" ]]; then
  exec ray job submit --address "$dashboard" --working-dir . -- "${command[@]}"
fi
exec "${command[@]}"
