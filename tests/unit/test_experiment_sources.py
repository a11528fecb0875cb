# SPDX-License-Identifier: Apache-2.0
"""Every setting of an experiment with a launch script names where it was taken from, or says that it is our
judgement."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "flashrl_verl" / "configs" / "experiment"
SCRIPTED = sorted(path.stem.removeprefix("run_") for path in (ROOT / "recipe" / "flashrl").glob("run_*.sh"))
TAG = re.compile(r"\[([A-Z][\w-]+|verl-[\w-]+)\]")
OWN = {"train_files", "val_files", "project_name", "experiment_name"}
"""Paths and names: nothing to take over."""


def _text(experiment):
    return (EXPERIMENTS / f"{experiment}.yaml").read_text()


def _settings(experiment):
    """(key, what the comment on its line and the ones right above it say)."""
    above = []
    for line in _text(experiment).partition("_self_\n")[2].splitlines():
        setting, _, comment = line.partition("#")
        if not setting.strip():
            above = [*above, comment] if comment else []
            continue
        key, _, value = setting.partition(":")
        if value.strip():
            yield key.strip(), " ".join([*above, comment])
        above = []


def _leaves(node):
    return sum(_leaves(value) if isinstance(value, dict) else 1 for value in node.values())


def _sources(experiment):
    """Tag -> where it is, as the head of the file says."""
    head = _text(experiment).partition("\ndefaults:")[0].replace("\n#   [", "\0[").replace("\n#", "")
    return {tag: where for tag, where in re.findall(rf"\0{TAG.pattern}([^\0]+)", head)}


@pytest.mark.parametrize("experiment", SCRIPTED)
def test_every_setting_names_its_source(experiment):
    settings = list(_settings(experiment))
    stated = OmegaConf.to_container(OmegaConf.load(EXPERIMENTS / f"{experiment}.yaml"))
    del stated["defaults"]
    assert len(settings) == _leaves(stated)
    for key, said in settings:
        assert key in OWN or TAG.search(said) or "our judgement" in said, key


@pytest.mark.parametrize("experiment", SCRIPTED)
def test_every_source_is_a_file_at_a_commit_or_a_document(experiment):
    parent = "dapo_qwen2.5_32b_int8"
    inherits = f"  - {parent}\n" in _text(experiment)
    sources = {**(_sources(parent) if inherits else {}), **_sources(experiment)}
    used = {tag for _, said in _settings(experiment) for tag in TAG.findall(said)}
    assert used <= set(sources), used - set(sources)
    for tag, where in sources.items():
        assert re.search(r"[\w-]+/[\w./-]+\.(sh|md) at [0-9a-f]{7}\b|arXiv \d{4}\.\d{5}|https://", where), tag
