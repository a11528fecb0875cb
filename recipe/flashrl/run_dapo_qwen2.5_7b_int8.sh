#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DAPO on Qwen2.5-7B-Instruct with INT8 rollouts, one node x 8 GPUs.
# Every setting, with its source: flashrl_verl/configs/experiment/dapo_qwen2.5_7b_int8.yaml.
# Paths, and where it runs: launch.sh beside this file.
#
#   bash recipe/flashrl/run_dapo_qwen2.5_7b_int8.sh --dry-run        # check the configuration, print what differs from verl's, start nothing
#   bash recipe/flashrl/run_dapo_qwen2.5_7b_int8.sh \
#       actor_rollout_ref.model.path=/shared/models/Qwen2.5-7B-Instruct \
#       data.train_files=/shared/data/dapo-math-17k.parquet \
#       data.val_files=/shared/data/aime-2024.parquet \
#       trainer.default_local_dir=/shared/checkpoints/dapo-7b
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch dapo_qwen2.5_7b_int8 "$@"
