#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DAPO on Qwen2.5-32B with BF16 rollouts and TIS, 4 nodes x 8 GPUs: what the INT8 run is compared with.
# Every setting, with its source: flashrl_verl/configs/experiment/dapo_qwen2.5_32b_bf16_tis.yaml.
# Paths, and where it runs: launch.sh beside this file.
#
#   bash recipe/flashrl/run_dapo_qwen2.5_32b_bf16_tis.sh --dry-run        # check the configuration, print what differs from verl's, start nothing
#   bash recipe/flashrl/run_dapo_qwen2.5_32b_bf16_tis.sh \
#       actor_rollout_ref.model.path=/shared/models/Qwen2.5-32B \
#       data.train_files=/shared/data/dapo-math-17k.parquet \
#       data.val_files=/shared/data/aime-2024.parquet \
#       trainer.default_local_dir=/shared/checkpoints/dapo-32b-bf16 trainer.nnodes=4
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch dapo_qwen2.5_32b_bf16_tis "$@"
