# SPDX-License-Identifier: Apache-2.0
# What the run_*.sh beside this file have in common; they source it. Words given to them are Hydra overrides on top of the
# experiment's YAML, and --dry-run checks the configuration and starts nothing.
#
# Paths have to be readable on every node; relative ones start at the directory that holds recipe/.
# Where it runs: on the Ray cluster of this machine, or, when RAY_JOB_ADDRESS (or an http:// RAY_ADDRESS) names a Ray
# dashboard, there through `ray job submit`. Both are Ray's own variables; nothing else is read from the environment.

# launch EXPERIMENT [WORD...]
launch() {
  cd "$(dirname "${BASH_SOURCE[0]}")/../.."
  local command=(python3 -m recipe.flashrl.main_flashrl "experiment=$1" "${@:2}")

  local dashboard="${RAY_JOB_ADDRESS:-}" word
  if [[ -z "$dashboard" && "${RAY_ADDRESS:-}" == http* ]]; then
    dashboard="$RAY_ADDRESS"
  fi
  for word in "${@:2}"; do
    if [[ "$word" == --dry-run || "$word" == --cfg ]]; then
      dashboard=""
    fi
  done

  if [[ -n "$dashboard" ]]; then
    exec ray job submit --address "$dashboard" --working-dir . -- "${command[@]}"
  fi
  exec "${command[@]}"
}
