# SPDX-License-Identifier: Apache-2.0
"""The actor's correction is verl's correction, wherever the batch is cut; verl computes every reference."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from flashrl_verl.correction import correct_shard, shard_weights
from flashrl_verl.correction_metrics import Statistics, finalize_metrics, shard_statistics
from flashrl_verl.correction_rejection import judge
from flashrl_verl.correction_settings import REJECTIONS as REJECTIONS_OF_VERL
from flashrl_verl.correction_settings import CorrectionSettings, Level
from flashrl_verl.errors import ConfigError, FlashRLError

# Loaded by path: verl's wheel installs a package called `tests`.
CASES_FILE = Path(__file__).parents[1] / "correction_cases.py"
_spec = importlib.util.spec_from_file_location("correction_cases", CASES_FILE)
cases = importlib.util.module_from_spec(_spec)
sys.modules["correction_cases"] = cases
_spec.loader.exec_module(cases)

TIS = CorrectionSettings(level=Level.TOKEN, upper=2.0)


def assert_metrics_equal(ours: dict, verls: dict, dtype: torch.dtype) -> None:
    """float32: 1e-5 relative, 1e-6 absolute; float64: 1e-9 relative, 1e-7 absolute.

    verl takes the deviation over tokens as sqrt(mean(w^2) - mean(w)^2), whose cancellation leaves an error of
    some eps in the *variance*; ours sums in float64. So variances are compared, relative to the mean square.
    """
    relative, absolute = (1e-5, 1e-6) if dtype is torch.float32 else (1e-9, 1e-7)
    assert ours.keys() == verls.keys()
    for name, value in verls.items():
        if name == "rollout_corr/rollout_is_std":
            scale = verls["rollout_corr/rollout_is_mean"] ** 2 + value**2
            assert ours[name] ** 2 == pytest.approx(value**2, abs=absolute * scale), name
        elif name.endswith("_std") and "_rs_" in name and not name.endswith("_seq_std"):
            # Likewise; the statistic is clamped to the bounds, which are near 1 at most here.
            assert ours[name] ** 2 == pytest.approx(value**2, abs=2 * absolute), name
        else:
            assert ours[name] == pytest.approx(value, rel=relative, abs=absolute), name


def assert_weights_equal(ours: torch.Tensor | None, verls: torch.Tensor | None) -> None:
    """1e-6 relative; the columns that a narrower shard lacks are zero in verl's weights."""
    if verls is None:
        assert ours is None
        return
    assert ours.dtype == verls.dtype and not ours.requires_grad
    torch.testing.assert_close(ours, verls[:, : ours.shape[1]], rtol=1e-6, atol=1e-9)
    assert not verls[:, ours.shape[1] :].any()


def measure(batch, settings: CorrectionSettings) -> tuple[torch.Tensor | None, torch.Tensor, Statistics]:
    """One shard before anything is reduced: weights, mask after rejection, statistics."""
    mask = batch.mask.bool()
    old, rollout = batch.old * mask, batch.rollout * mask
    weights = None if settings.level is None else shard_weights(old - rollout, mask, settings)
    judgements = judge(old - rollout, mask, settings.rejections)
    keep = torch.stack([mask, *(judgement.keep for judgement in judgements)]).all(0)
    return weights, keep, shard_statistics(old, rollout, mask, weights, judgements, settings)


def merge(left: Statistics, right: Statistics) -> Statistics:
    """What the all-reduce does."""
    return Statistics(
        token_sums={k: v + right.token_sums[k] for k, v in left.token_sums.items()},
        row_sums={k: v + right.row_sums[k] for k, v in left.row_sums.items()},
        response_sums={k: v + right.response_sums[k] for k, v in left.response_sums.items()},
        maxima={k: max(v, right.maxima[k]) for k, v in left.maxima.items()},
        minima={k: min(v, right.minima[k]) for k, v in left.minima.items()},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", cases.NODES)
def test_one_shard_gives_verls_weights_and_metrics(name: str, dtype: torch.dtype) -> None:
    settings = CorrectionSettings.from_config(cases.NODES[name])
    for seed in cases.SEEDS if dtype is torch.float32 else cases.SEEDS[:40]:
        batch = cases.random_batch(seed, dtype)
        ours, verls = cases.our_answer(batch, settings), cases.verl_answer(batch, cases.NODES[name])
        assert_weights_equal(ours.weights, verls.weights)
        assert torch.equal(ours.mask, verls.mask)
        assert_metrics_equal(ours.metrics, verls.metrics, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", cases.NODES)
def test_shards_add_up_to_verls_answer_for_the_whole_batch(name: str, dtype: torch.dtype) -> None:
    settings = CorrectionSettings.from_config(cases.NODES[name])
    empty = dropped = rejected = kept = 0
    for seed in cases.SEEDS if dtype is torch.float32 else cases.SEEDS[:40]:
        batch = cases.random_batch(seed, dtype)
        if len(batch.old) < 4:
            continue
        expected = cases.verl_answer(batch, cases.NODES[name])
        for shards in (2, 4):
            parts = cases.split_rows(len(batch.old), shards, seed)
            weights, masks, stats = zip(*(measure(batch.shard(rows), settings) for rows in parts), strict=True)
            metrics = finalize_metrics(reduce(merge, stats), settings)
            assert_metrics_equal(metrics, expected.metrics, dtype)
            for rows, ours, mask in zip(parts, weights, masks, strict=True):
                tokens = batch.mask[rows].any()
                empty += not tokens
                assert torch.equal(mask, expected.mask[rows][:, : mask.shape[1]])
                kept += int(mask.sum())
                rejected += int(batch.mask[rows].sum() - mask.sum())
                if ours is not None:
                    dropped += bool(tokens and not ours.any())
                    ours = ours / metrics.get("rollout_corr/rollout_is_batch_norm_factor", 1.0)
                    assert_weights_equal(ours, expected.weights[rows])
    assert empty > 0, "no shard without a token was drawn"
    if settings.lower is not None:
        assert dropped > 0, "no shard was drawn whose every token IcePop drops"
    if settings.rejections:
        assert min(rejected, kept) > 0.05 * (rejected + kept), "hardly anything was rejected, or hardly anything kept"


@pytest.mark.parametrize(
    ("world_size", "batches"),
    [(2, 30), (4, 20), *(pytest.param(size, len(cases.SEEDS), marks=pytest.mark.slow) for size in (2, 4))],
)
def test_ranks_of_a_process_group_get_verls_answer(world_size: int, batches: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    outputs = [tmp_path / f"rank{rank}.pt" for rank in range(world_size)]
    # Each rank is a process of its own: another test may have made this one's process group.
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CASES_FILE), str(rank), str(world_size), str(store), str(batches), str(output)],
            env={**os.environ, "PYTHONPATH": str(CASES_FILE.parents[1])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    answers = [torch.load(output) for output in outputs]
    for seed, name in answers[0].keys() - {"NaN"}:
        batch = cases.random_batch(seed)
        expected = cases.verl_answer(batch, cases.NODES[name])
        for rows, answer in zip(cases.split_rows(len(batch.old), world_size, seed), answers, strict=True):
            weights, mask, metrics = answer[seed, name]
            assert metrics == answers[0][seed, name][2]
            assert_metrics_equal(metrics, expected.metrics, torch.float32)
            assert_weights_equal(weights, None if expected.weights is None else expected.weights[rows])
            assert torch.equal(mask, expected.mask[rows][:, : mask.shape[1]])
    drawn = sum(len(cases.random_batch(seed).old) >= world_size for seed in cases.SEEDS[:batches])
    assert len(answers[0]) == 1 + len(cases.NODES) * drawn
    # A NaN on the last rank alone stops all ranks, with one message.
    assert f"1 of {4 * world_size} response tokens" in answers[0]["NaN"]
    assert all(answer["NaN"] == answers[0]["NaN"] for answer in answers)


@pytest.mark.parametrize("name", [name for name in cases.NODES if "normalized" not in name and name != "metrics only"])
def test_weights_and_rejections_do_not_depend_on_the_micro_batch_split(name: str) -> None:
    settings = CorrectionSettings.from_config(cases.NODES[name])
    for seed in cases.SEEDS[:20]:
        batch = cases.random_batch(seed)
        whole = cases.our_answer(batch, settings)
        for shards in range(2, len(batch.old) + 1):
            for rows in cases.split_rows(len(batch.old), shards, seed):
                weights, mask, _ = measure(batch.shard(rows), settings)
                assert_weights_equal(weights, None if whole.weights is None else whole.weights[rows])
                assert torch.equal(mask, whole.mask[rows][:, : mask.shape[1]])


def test_padding_is_never_read() -> None:
    batch = cases.random_batch(3)
    outside = ~batch.mask.bool()
    assert outside.any()
    clean = correct_shard(*batch[:3], TIS)
    dirty = [x.masked_fill(outside, torch.nan) for x in (batch.old, batch.rollout)]
    answer = correct_shard(*dirty, batch.mask, TIS)
    assert torch.equal(answer.weights, clean.weights) and answer.metrics == clean.metrics
    assert not answer.weights[outside].any()


def test_a_batch_that_icepop_drops_whole_has_zero_weights_and_no_effective_sample() -> None:
    old, mask = torch.zeros(2, 3), torch.ones(2, 3)
    settings = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=2.0, batch_normalize=True)
    with pytest.raises(ZeroDivisionError):  # why `shard_weights` catches it; if verl mends this, drop the clause
        cases.verl_answer(cases.Batch(old, old - 5.0, mask, mask.sum(-1)), cases.NODES["token IcePop"])
    answer = correct_shard(old, old - 5.0, mask, settings)
    metrics = answer.metrics
    assert not answer.weights.any()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_not_finite_are_counted_and_refused(value: float) -> None:
    good, mask = torch.zeros(2, 3), torch.ones(2, 3)
    bad = good.clone()
    bad[0, :2] = value
    with pytest.raises(FlashRLError, match=r"2 of 6 .* rollout_log_probs.*logprobs_mode"):
        correct_shard(good, bad, mask, TIS)
    with pytest.raises(FlashRLError, match=r"2 of 6 .* old_log_probs.*diverged"):
        correct_shard(bad, good, mask, CorrectionSettings(level=None))


def test_unusable_batches_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="calculate_log_probs"):
        correct_shard(x, None, x + 1, TIS)
    with pytest.raises(FlashRLError, match=r"differ in shape: .*\(2, 2\)"):
        correct_shard(x, x[:, :2], x + 1, TIS)
    with pytest.raises(FlashRLError, match="no token inside response_mask"):
        correct_shard(x, x, x, TIS)


@pytest.mark.parametrize("spec", [2.0, 2, "2.0", " 0.5_5.0 ", "1e-05_1.0", "1.0_1.0"])
def test_thresholds_are_read_as_verl_reads_them(spec: float | str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    settings = CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})
    expected = _parse_rollout_is_threshold(spec)
    assert (settings.upper, settings.lower) == expected
    assert _parse_rollout_is_threshold(settings.threshold) == expected


REJECTIONS = [
    ("token_k1", "0.5_2.0"),
    ("seq_mean_k1", 1.5),
    ("token_k2,seq_max_k3", "0.1, 2"),
    ("seq_sum_k1, token_k3,seq_sum_k1", "1e-2_1e2,0.5"),
    ("seq_sum_k2,seq_mean_k2", 0.25),
]


@pytest.mark.parametrize(("options", "thresholds"), REJECTIONS)
def test_criteria_are_read_as_verl_reads_them(options: str, thresholds: float | str) -> None:
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS, _parse_rollout_rs_thresholds

    assert set(REJECTIONS_OF_VERL) == SUPPORTED_ROLLOUT_RS_OPTIONS
    settings = CorrectionSettings.from_config({"rollout_is": None, "rollout_rs": options, "rollout_rs_threshold": thresholds})
    names = list(dict.fromkeys(name.strip() for name in options.split(",")))
    expected = _parse_rollout_rs_thresholds(names, thresholds)
    assert {r.option: {"lower": r.lower, "upper": r.upper} for r in settings.rejections} == expected
    assert [r.option for r in settings.rejections] == names


@pytest.mark.parametrize(
    ("options", "thresholds"),
    [
        ("token_k1", None),
        ("token_k1", 0),
        ("token_k1", "2.0_0.5"),
        ("token_k1", "0.5_"),
        ("seq_mean_k3", "0.1_0.2"),
        ("seq_mean_k3", -1),
        ("seq_mean_k3", "x"),
        ("token_k2,token_k3,seq_max_k2", "1,2"),
        ("token_k5", 1.0),
        ("", 1.0),
    ],
)
def test_criteria_that_verl_refuses_are_refused(options: str, thresholds: object) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    with pytest.raises((ValueError, ZeroDivisionError)):
        compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), options, thresholds)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_rs"):
        CorrectionSettings.from_config({"rollout_is": None, "rollout_rs": options, "rollout_rs_threshold": thresholds})


def test_bypass_mode_attaches_nothing() -> None:
    from flashrl_verl.actor import attach_correction

    batch = cases.random_batch(0)
    fields = dict(zip(("old_log_probs", "rollout_log_probs", "response_mask"), batch[:3], strict=True))
    data = TensorDict({name: field.clone() for name, field in fields.items()}, batch_size=len(batch.old))
    settings = CorrectionSettings.from_config({**cases.NODES["token TIS, two rejections"], "bypass_mode": True})
    assert attach_correction(data, settings) == {}
    assert set(data.keys()) == set(fields) and torch.equal(data["response_mask"], batch.mask)


@pytest.mark.parametrize("spec", [0, -1.0, True, None, "", "x", "nan", "5.0_0.5", "0_2", "0.5_", "1_2_3x"])
def test_thresholds_that_verl_refuses_are_refused(spec: object) -> None:
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    if spec != "nan":  # verl lets NaN pass
        with pytest.raises((ValueError, TypeError)):
            _parse_rollout_is_threshold(spec)
    with pytest.raises(ConfigError, match="algorithm.rollout_correction.rollout_is_threshold="):
        CorrectionSettings.from_config({"rollout_is": "token", "rollout_is_threshold": spec})


@pytest.mark.parametrize(
    ("node", "key"),
    [
        (None, "algorithm.rollout_correction"),
        ({"rollout_is": "tokens"}, "rollout_is=tokens"),
        ({"rollout_rs": "token_k4"}, "rollout_rs=token_k4"),
        ({"bypass_mode": True, "loss_type": "gspo"}, "loss_type=gspo"),
    ],
)
def test_what_there_is_not_is_refused_with_the_key_to_change(node: dict | None, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        CorrectionSettings.from_config(node)


def test_settings_are_read_from_verls_own_nodes() -> None:
    from omegaconf import OmegaConf
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    assert CorrectionSettings.from_config(RolloutCorrectionConfig.decoupled_token_is(2.0)) == TIS
    icepop = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=5.0)
    assert CorrectionSettings.from_config(RolloutCorrectionConfig.decoupled_token_icepop()) == icepop
    node = {"rollout_is": None, "rollout_is_threshold": None, "rollout_rs": None, "bypass_mode": False}
    assert CorrectionSettings.from_config(OmegaConf.create(node)) == CorrectionSettings(level=None)


def jagged(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = [row[:n] for row, n in zip(padded, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("name", ["token TIS", "sequence TIS normalized", "token TIS, two rejections", "reject seq_mean_k1"])
def test_jagged_batches_get_jagged_weights_and_masks_that_verls_splitting_carries_along(name: str) -> None:
    from verl.utils import tensordict_utils as tu

    from flashrl_verl.actor import attach_correction

    batch = cases.random_batch(10)  # 8 rows
    fields = dict(zip(("old_log_probs", "rollout_log_probs", "response_mask"), batch[:3], strict=True))
    data = TensorDict({k: jagged(v, batch.lengths) for k, v in fields.items()}, batch_size=len(batch.old))
    metrics = attach_correction(data, CorrectionSettings.from_config(cases.NODES[name]))
    expected = cases.verl_answer(batch, cases.NODES[name])
    assert_metrics_equal(metrics, expected.metrics, torch.float32)
    fields = {"response_mask": expected.mask.long()}
    if expected.weights is not None:
        fields["rollout_is_weights"] = expected.weights
    assert ("rollout_is_weights" in data) == ("rollout_is_weights" in fields)
    for field, padded in fields.items():
        assert torch.equal(data[field].offsets(), data["old_log_probs"].offsets())
        assert data[field].dtype == padded.dtype
        assert_weights_equal(data[field].to_padded_tensor(0), padded)
    for micro_batches in (2, 4, 8):
        step = len(batch.old) // micro_batches
        for i, part in enumerate(tu.chunk_tensordict(data, micro_batches)):
            rows = slice(i * step, (i + 1) * step)
            for field, padded in fields.items():
                assert_weights_equal(part[field].to_padded_tensor(0), padded[rows])


def test_metrics_only_adds_no_weights() -> None:
    from flashrl_verl.actor import attach_correction

    batch = cases.random_batch(0)
    fields = dict(zip(("old_log_probs", "rollout_log_probs", "response_mask"), batch[:3], strict=True))
    data = TensorDict(fields, batch_size=len(batch.old))
    metrics = attach_correction(data, CorrectionSettings(level=None))
    assert "rollout_is_weights" not in data
    assert_metrics_equal(metrics, cases.verl_answer(batch, cases.NODES["metrics only"]).metrics, torch.float32)


def test_rows_with_missing_log_probs_are_named() -> None:
    from flashrl_verl.actor import attach_correction

    full, short = torch.tensor([3, 2]), torch.tensor([3, 1])
    x = torch.zeros(2, 3)
    data = TensorDict(
        {
            "old_log_probs": jagged(x, full),
            "response_mask": jagged(x + 1, full),
            "rollout_log_probs": jagged(x, short),
        },
        batch_size=2,
    )
    with pytest.raises(FlashRLError, match=r"\[2, 2, 1\] entries in row 1"):
        attach_correction(data, TIS)
    del data["rollout_log_probs"]
    with pytest.raises(ConfigError, match="calculate_log_probs"):
        attach_correction(data, TIS)
    assert attach_correction(data, CorrectionSettings(level=None)) == {}


def test_metrics_survive_verls_collection_and_reduction() -> None:
    from verl.protocol import BatchData
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    from flashrl_verl.actor import extend_metrics

    metrics = {
        "rollout_corr/kl": 0.25,
        "rollout_corr/rollout_is_max": 2.0,
        "rollout_corr/rollout_is_min": 0.5,
    }
    outputs = [tu.get_tensordict({}, non_tensor_dict={"metrics": {"loss": [1.0, 3.0]}}) for _ in range(2)]
    collected = BatchData([extend_metrics(output, metrics) for output in outputs]).concat()
    reduced = reduce_metrics(rename_dict(collected["metrics"], "actor/"))
    assert reduced == {"actor/loss": 2.0, **{f"actor/{name}": value for name, value in metrics.items()}}


def test_update_actor_is_dispatched_as_verls() -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from flashrl_verl.actor import FlashRLActorWorker

    assert FlashRLActorWorker.update_actor is not ActorRolloutRefWorker.update_actor
    ours = getattr(FlashRLActorWorker.update_actor, MAGIC_ATTR)
    verls = getattr(ActorRolloutRefWorker.update_actor, MAGIC_ATTR)
    assert ours.keys() == verls.keys()
    assert (ours["execute_mode"], ours["blocking"]) == (verls["execute_mode"], verls["blocking"])
    assert ours["dispatch_mode"].keys() == verls["dispatch_mode"].keys()
    for key, function in verls["dispatch_mode"].items():
        assert (ours["dispatch_mode"][key].func, ours["dispatch_mode"][key].args) == (
            function.func,
            function.args,
        )
