#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DAPO on GSM8K with a model of 0.5 billion parameters and INT8 rollouts, one GPU.
# Every setting, with its source: flashrl_verl/configs/experiment/gsm8k_qwen2.5_0.5b_int8.yaml.
# Paths, and where it runs: launch.sh beside this file.
#
#   bash recipe/flashrl/run_gsm8k_qwen2.5_0.5b_int8.sh --dry-run        # check the configuration, print what differs from verl's, start nothing
#   bash recipe/flashrl/run_gsm8k_qwen2.5_0.5b_int8.sh \
#       actor_rollout_ref.model.path=/shared/models/Qwen2.5-Coder-0.5B-Instruct \
#       data.train_files=/shared/data/gsm8k-boxed-train.parquet \
#       data.val_files=/shared/data/gsm8k-boxed-test.parquet \
#       trainer.default_local_dir=/shared/checkpoints/gsm8k-0.5b
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch gsm8k_qwen2.5_0.5b_int8 "$@"
