#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# FlashRL's throughput figures: rollout speed of 7B, 14B and 32B shapes by precision, short and long contexts, with the whole
# memory and with as much as an A100-80GB gives. Two H200s took 20 minutes for the whole memory; by estimate everything on one is
# an hour and a quarter, without profiles. The same command goes on after a stop, behind the engines that are measured (4 to 8
# minutes each at 32B), so that `timeout -s INT 560 bash scripts/figure_throughput.sh --no-profile` does it in pieces.
#
#   bash scripts/figure_throughput.sh [words for flashrl bench rollout]
#
#   FIGURE_OUTPUT=outputs/throughput             results, a folder for each model and memory, and throughput.png, throughput.md
#   FIGURE_MODELS="qwen2.5-7b qwen2.5-14b ..."   shapes
#   FIGURE_MEMORY="0.9 0.51"                     shares of the GPU's memory for vLLM: 0.51 of an H200 is 0.9 of an A100-80GB
#   FIGURE_ARMS=bf16,int8,...                    precisions, with the format of the KV cache
#   FIGURE_WORK=256x256+384,28x8192+192          sequences x prompt + response
#   FIGURE_GPUS=1                                engines at a time, each on a GPU of its own
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
help_if_asked "$@"
cd "$root"

output=${FIGURE_OUTPUT:-outputs/throughput}
folders=()
for memory in ${FIGURE_MEMORY:-0.9 0.51}; do
  for model in ${FIGURE_MODELS:-qwen2.5-32b qwen2.5-14b qwen2.5-7b}; do
    folder=$output/$(basename "$model")-$memory
    python -m benchmarks rollout --model "$model" --arm "${FIGURE_ARMS:-bf16,int8,fp8,int8:int8_per_token_head}" \
      --work "${FIGURE_WORK:-256x256+384,28x8192+192}" --gpu-memory-utilization "$memory" --repeats 2 \
      --parallel "${FIGURE_GPUS:-1}" --output "$folder" "$@"
    folders+=("$folder")
  done
done
python -m benchmarks rollout-figure "${folders[@]}" --output "$output/throughput.png"
