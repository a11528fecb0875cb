#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DAPO on Qwen2.5-32B with INT8 rollouts, 4 nodes x 8 GPUs.
# Every setting, with its source: flashrl_verl/configs/experiment/dapo_qwen2.5_32b_int8.yaml.
# Paths, and where it runs: launch.sh beside this file.
#
#   bash recipe/flashrl/run_dapo_qwen2.5_32b_int8.sh --dry-run        # check the configuration, print what differs from verl's, start nothing
#   bash recipe/flashrl/run_dapo_qwen2.5_32b_int8.sh \
#       actor_rollout_ref.model.path=/shared/models/Qwen2.5-32B \
#       data.train_files=/shared/data/dapo-math-17k.parquet \
#       data.val_files=/shared/data/aime-2024.parquet \
#       trainer.default_local_dir=/shared/checkpoints/dapo-32b trainer.nnodes=4
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch dapo_qwen2.5_32b_int8 "$@"
