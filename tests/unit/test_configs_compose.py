# SPDX-License-Identifier: Apache-2.0
"""Every shipped YAML composes with verl's configuration through both entry points, and verl accepts it."""

import importlib.util
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashrl_verl.settings import CORRECTION, ROLLOUT, KVCache, Precision, get
from flashrl_verl.tools.recipe_process import ROOT
from flashrl_verl.validation import GROUPS, validate_by_verl, validate_config

CONFIGS = ROOT / "flashrl_verl" / "configs"
FILES = {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in CONFIGS.iterdir() if folder.is_dir()}
EXPERIMENTS = FILES["experiment"]

CORRECTIONS = {
    "tis": ("token", 2.0, None, False),
    "tis_5": ("token", 5.0, None, False),
    "tis_8": ("token", 8.0, None, False),
    "seq_tis": ("sequence", 2.0, None, False),
    "icepop": ("token", "0.5_5.0", None, False),
    "geo_rs": (None, 2.0, "seq_mean_k1", False),
    "bypass": (None, 2.0, None, True),
    "none": (None, 2.0, None, False),
}
"""What each preset is: level, threshold, rejection and mode."""


def through_main_flashrl(experiment, *overrides):
    with initialize_config_dir(str(ROOT / "recipe" / "flashrl" / "config"), version_base=None):
        return compose("flashrl_trainer", overrides=[f"experiment={experiment}", *overrides])


def through_main_ppo(experiment, *overrides):
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    groups = ["hydra.searchpath=[pkg://flashrl_verl.configs]", f"+experiment={experiment}"]
    with initialize_config_dir(str(verl / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[*groups, *overrides])


@pytest.fixture(scope="module")
def composed():
    """Each experiment, composed once."""
    return {experiment: through_main_flashrl(experiment) for experiment in EXPERIMENTS}


def check(cfg):
    """The settings of a configuration that is valid and asks for the log-probs of the policy that sampled."""
    assert get(cfg, f"{ROLLOUT}.logprobs_mode") == "processed_logprobs"
    assert get(cfg, f"{ROLLOUT}.calculate_log_probs") is True
    return validate_config(cfg)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_is_valid_and_has_the_precision_in_its_name(composed, experiment):
    (named,) = [p for p in Precision if p.value in experiment.split("_")] or [Precision.INT8]
    assert check(composed[experiment]).precision is named


@pytest.mark.parametrize("size", ["32b", "7b"])
@pytest.mark.parametrize("precision", Precision)
def test_a_baseline_has_no_int8_kv_cache(size, precision):
    expected = KVCache.INT8_PER_TOKEN_HEAD if precision is Precision.INT8 else KVCache.AUTO
    cfg = through_main_flashrl(f"dapo_qwen2.5_{size}_int8", f"flashrl.precision={precision.value}")
    assert check(cfg).kv_cache is expected
    assert get(cfg, f"{ROLLOUT}.custom.flashrl.kv_cache") == expected.value


@pytest.mark.parametrize("experiment", ["quickstart", "dapo_qwen2.5_32b_int8"])
def test_both_entry_points_compose_the_same(composed, experiment):
    assert OmegaConf.to_yaml(through_main_ppo(experiment), resolve=True, sort_keys=True) == OmegaConf.to_yaml(
        composed[experiment], resolve=True, sort_keys=True
    )


@pytest.mark.parametrize(
    ("experiment", "preset"),
    # One that sets none of its keys on every experiment: no key of an experiment outlives the preset it was set for.
    [*((e, "none") for e in EXPERIMENTS), *(("quickstart", p) for p in CORRECTIONS if p != "none")],
)
def test_a_correction_that_is_chosen_is_the_one_that_runs(experiment, preset):
    cfg = through_main_flashrl(experiment, f"correction={preset}")
    check(cfg)
    keys = ("rollout_is", "rollout_is_threshold", "rollout_rs", "bypass_mode")
    assert tuple(get(cfg, f"{CORRECTION}.{key}") for key in keys) == CORRECTIONS[preset]


def test_the_other_groups_can_be_chosen_and_have_no_more_than_these_files():
    assert set(FILES) - {"__pycache__"} == set(GROUPS) and set(FILES["correction"]) == set(CORRECTIONS)
    for hardware in FILES["hardware"]:
        cfg = through_main_ppo("base", f"hardware={hardware}")
        assert check(cfg) and cfg.trainer.device == hardware


def test_runs_that_share_a_checkpoint_folder_or_a_name_are_the_same_run(composed):
    """verl resumes what it finds in the folder. Each experiment, at each precision of the command line."""
    runs = {}
    for experiment, cfg in composed.items():
        for precision in Precision:
            run = cfg.copy()
            run.flashrl.precision = precision.value
            text = OmegaConf.to_yaml(run, resolve=True, sort_keys=True)
            for key in ("experiment_name", "default_local_dir"):
                runs.setdefault(f"{key}={run.trainer[key]}", {})[experiment, precision.value] = text
    for folder, sharing in runs.items():
        assert len(set(sharing.values())) == 1, f"{folder}: {list(sharing)}"


@pytest.mark.filterwarnings("ignore:Disabled critic")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_verl_accepts_every_key(composed, experiment):
    """verl's dataclasses refuse keys they do not know; its own validation runs over the rest."""
    from verl.utils.config import omega_conf_to_dataclass

    cfg = composed[experiment].copy()
    if experiment == "base":  # sizes belong to the experiments on top of it
        cfg.data.train_batch_size = 1024
        cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
        cfg.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 1
    for node in (cfg.actor_rollout_ref.rollout, cfg.algorithm):
        omega_conf_to_dataclass(node)
    validate_by_verl(cfg)
