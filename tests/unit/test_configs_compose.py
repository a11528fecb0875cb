# SPDX-License-Identifier: Apache-2.0
"""Every shipped YAML composes with verl's configuration through both entry points, and verl accepts it.

The difference to verl's defaults is a snapshot; FLASHRL_UPDATE_SNAPSHOTS=1 writes it anew.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashrl_verl.refit.self_check import sleeps_between_steps
from flashrl_verl.settings import Precision
from flashrl_verl.tools import dry_run as dryrun
from flashrl_verl.validation import validate_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "flashrl_verl" / "configs"
SNAPSHOTS = Path(__file__).with_name("snapshots")
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
SCRIPTED = {
    "dapo_qwen2.5_32b_bf16_tis",
    "dapo_qwen2.5_32b_fp8",
    "dapo_qwen2.5_32b_int8",
    "dapo_qwen2.5_32b_int8_a100",
    "dapo_qwen2.5_7b_int8",
    "dapo_qwen3_30b_a3b_int8",
    "gsm8k_qwen2.5_0.5b_int8",
}
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "experiment"
)


def _through_main_flashrl(experiment, *overrides):
    with initialize_config_dir(str(ROOT / "recipe" / "flashrl" / "config"), version_base=None):
        return compose("flashrl_trainer", overrides=[f"experiment={experiment}", *overrides])


def _through_main_ppo(experiment, *overrides):
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    groups = ["hydra.searchpath=[pkg://flashrl_verl.configs]", f"+experiment={experiment}"]
    with initialize_config_dir(str(verl / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[*groups, *overrides])


@pytest.fixture(scope="module")
def composed():
    """Each experiment, composed once."""
    return {experiment: _through_main_flashrl(experiment) for experiment in EXPERIMENTS}


@pytest.fixture(scope="module")
def verl_defaults():
    return dryrun.verl_defaults()


def _flat(cfg):
    """Dotted key -> value of every leaf, resolved."""
    leaves = {}

    def visit(prefix, node):
        if isinstance(node, dict) and node:
            for key, value in node.items():
                visit(f"{prefix}{key}.", value)
        else:
            leaves[prefix[:-1]] = node

    visit("", OmegaConf.to_container(cfg, resolve=True))
    return leaves


CORRECTIONS = {
    ("token", 2.0, None, False): "tis",
    ("token", 5.0, None, False): "tis_5",
    ("token", 8.0, None, False): "tis_8",
    ("sequence", 2.0, None, False): "seq_tis",
    ("token", "0.5_5.0", None, False): "icepop",
    (None, None, "seq_mean_k1", False): "geo_rs",
    (None, None, None, True): "bypass",
    (None, 2.0, None, False): "metrics_only",
    (None, None, None, False): "none",
}
"""What tells the files of the group apart: level, threshold, rejection and mode."""


def test_every_file_of_the_groups_is_found():
    assert {"base", "quickstart", "smoke"} | SCRIPTED <= set(EXPERIMENTS)
    assert {"precision=int8", "precision=fp8", "precision=bf16", "hardware=cpu", "hardware=cuda"} <= set(OPTIONS)
    assert {f"correction={name}" for name in CORRECTIONS.values()} <= set(OPTIONS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_is_valid_and_has_the_precision_in_its_name(composed, experiment):
    (named,) = [p for p in Precision if p.value in experiment.split("_")] or [Precision.INT8]
    assert validate_config(composed[experiment]).precision is named


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_both_entry_points_compose_the_same(composed, experiment):
    assert _flat(_through_main_ppo(experiment)) == _flat(composed[experiment])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("entry", [_through_main_flashrl, _through_main_ppo])
def test_option_of_a_group_can_be_chosen_on_the_command_line(entry, option):
    # An experiment that did not choose this option itself, where there is a choice.
    cfg = entry("base" if option == "hardware=cpu" else "quickstart", option)
    settings = validate_config(cfg)
    group, name = option.split("=")
    chosen = {
        "precision": settings.precision.value,
        "hardware": cfg.trainer.device,
        "correction": CORRECTIONS[
            tuple(
                cfg.algorithm.rollout_correction[k]
                for k in ("rollout_is", "rollout_is_threshold", "rollout_rs", "bypass_mode")
            )
        ],
    }
    assert chosen[group] == name


@pytest.mark.parametrize("correction", sorted(CORRECTIONS.values()))
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_correction_that_is_chosen_is_the_one_that_runs_in_every_experiment(experiment, correction):
    """No key of an experiment outlives the preset it was set for."""
    found = _through_main_flashrl(experiment, f"correction={correction}").algorithm.rollout_correction
    told = tuple(found[key] for key in ("rollout_is", "rollout_is_threshold", "rollout_rs", "bypass_mode"))
    assert CORRECTIONS[told] == correction


@pytest.mark.parametrize("experiment", ["base", "quickstart", "dapo_qwen2.5_32b_int8"])
@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["hardware=cuda"], True),
        (["hardware=cuda", "actor_rollout_ref.rollout.free_cache_engine=false"], False),
        (["hardware=cpu"], False),
    ],
)
def test_the_self_check_knows_whether_the_engines_sleep(experiment, overrides, expected):
    cfg = _through_main_flashrl(experiment, *overrides)
    assert sleeps_between_steps(cfg.actor_rollout_ref.rollout) is expected


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_workers_get_the_settings_by_reference(composed, experiment):
    cfg = composed[experiment].copy()
    cfg.flashrl.precision = "bf16"
    cfg.flashrl.update_timeout_s = 32.0
    cfg.algorithm.rollout_correction.rollout_is_threshold = 4.0
    validate_config(cfg)
    assert cfg.actor_rollout_ref.rollout.custom.flashrl.precision == "bf16"
    assert cfg.actor_rollout_ref.rollout.custom.flashrl.update_timeout_s == 32.0
    assert cfg.actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is_threshold == 4.0


@pytest.fixture(scope="module")
def at_each_precision(composed):
    """Each experiment at each precision, as flashrl.precision= on the command line would have it."""
    runs = {(name, p): cfg.copy() for name, cfg in composed.items() for p in Precision}
    for (_, precision), cfg in runs.items():
        cfg.flashrl.precision = precision.value
    return runs


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_runs_of_two_precisions_share_no_file(at_each_precision, experiment):
    trainers = [at_each_precision[experiment, p].trainer for p in Precision]
    for key in ("experiment_name", "default_local_dir"):
        assert len({trainer[key] for trainer in trainers}) == len(Precision), key


def test_runs_that_share_a_checkpoint_folder_are_the_same_run(at_each_precision):
    """verl resumes what it finds there."""
    runs = {}
    for pair, cfg in at_each_precision.items():
        runs.setdefault(cfg.trainer.default_local_dir, {})[pair] = _flat(cfg)
    for folder, sharing in runs.items():
        assert len({str(flat) for flat in sharing.values()}) == 1, f"{folder}: {list(sharing)}"
    assert ("dapo_qwen2.5_32b_bf16_tis", Precision.BF16) in runs["checkpoints/DAPO/dapo-qwen2.5-32b-bf16"]


def _parents(name):
    """Experiments that this one starts from."""
    entries = OmegaConf.load(CONFIGS / "experiment" / f"{name}.yaml").get("defaults", [])
    return [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]


VARIANTS = {name: parent for name in EXPERIMENTS for parent in _parents(name) if parent != "base"}


def test_variants_of_an_experiment_are_found():
    assert VARIANTS["dapo_qwen2.5_7b_int8"] == "dapo_qwen2.5_32b_int8" and "gsm8k_qwen2.5_0.5b_int8" not in VARIANTS


@pytest.mark.parametrize("experiment", VARIANTS)
def test_variant_states_only_what_differs(composed, experiment):
    stated = OmegaConf.load(CONFIGS / "experiment" / f"{experiment}.yaml")
    del stated["defaults"]
    parent = dryrun.leaves(composed[VARIANTS[experiment]], resolve=False)
    for key, value in dryrun.leaves(stated, resolve=False).items():
        assert value != parent.get(key), key


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.startswith("correction=")])
def test_every_correction_records_the_log_probs(option):
    assert _through_main_flashrl("base", option).actor_rollout_ref.rollout.calculate_log_probs is True


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_verl_accepts_every_key(composed, experiment):
    """verl's dataclasses refuse keys they do not know; its own validation runs over the rest."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import config as verl_config

    cfg = composed[experiment].copy()
    sized = {
        "data.train_batch_size": 1024,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
    }
    if experiment == "base":  # sizes belong to the experiments on top of it
        for key, value in sized.items():
            OmegaConf.update(cfg, key, value)
    for node in (cfg.actor_rollout_ref.rollout, cfg.algorithm):
        verl_config.omega_conf_to_dataclass(node)
    assert not need_critic(cfg) and not need_reference_policy(cfg)
    verl_config.validate_config(config=cfg, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_difference_to_verls_defaults_is_the_snapshot(composed, verl_defaults, experiment):
    text = dryrun.table(dryrun.difference(composed[experiment], verl_defaults))
    snapshot = SNAPSHOTS / f"{experiment}.txt"
    if os.environ.get("FLASHRL_UPDATE_SNAPSHOTS") == "1":
        snapshot.write_text(text)
    assert text == snapshot.read_text(), "if this is meant, run again with FLASHRL_UPDATE_SNAPSHOTS=1"


def test_difference_of_verl_to_itself_is_empty(verl_defaults):
    assert dryrun.difference(verl_defaults, verl_defaults) == []


def test_difference_names_changed_added_and_removed_keys():
    ours = OmegaConf.create({"a": {"b": 1, "c": "${a.b}", "d": [1, True, None]}, "new": {"x": 0.5, "all": "${a}"}})
    defaults = OmegaConf.create({"a": {"b": 2, "c": "${a.b}", "old": None}, "new": {}})
    assert dryrun.difference(ours, defaults) == [
        ("a.b", "2", "1"),
        ("a.d", "-", "[1, true, null]"),
        ("new.x", "-", "0.5"),
        ("new.all", "-", "${a}"),
        ("a.old", "null", "-"),
    ]


def test_verls_own_entry_point_finds_the_groups(tmp_path):
    """The command of recipe/flashrl/README.md, stopped by Hydra after composition."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "hydra.searchpath=[pkg://flashrl_verl.configs]"]
    command += ["+experiment=quickstart", "hardware=cpu", "flashrl.precision=bf16", "--cfg", "job"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cfg = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert validate_config(cfg).precision is Precision.BF16


# ---- no setting travels through the environment


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_only_the_cpu_platform_sets_an_environment_variable(path):
    text = path.read_text()
    assert "oc.env" not in text
    names = set(re.findall(r"^\s+([A-Z][A-Z0-9_]+):", text, flags=re.M))
    assert names == ({"VERL_PLATFORM", "VLLM_CPU_KVCACHE_SPACE"} if path.stem == "cpu" else set())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_file_is_global_and_licensed(path):
    assert path.read_text().startswith("# @package _global_\n# SPDX-License-Identifier: Apache-2.0\n")


def test_describing_a_run_changes_neither_configuration_nor_environment(composed):
    cfg = composed["quickstart"]
    before, environment = OmegaConf.to_yaml(cfg), dict(os.environ)
    dryrun.report(cfg)
    assert OmegaConf.to_yaml(cfg) == before and dict(os.environ) == environment
