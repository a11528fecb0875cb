# SPDX-License-Identifier: Apache-2.0
"""The correction on shards is verl's correction of the whole batch, wherever it is cut; verl computes every
reference."""

import math
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import correction_cases as cases
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from flashrl_verl.correction.batch import LAG, attach_correction, correct_shard
from flashrl_verl.correction.settings import CorrectionSettings, Level
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.trainer.guard import limits

TIS = CorrectionSettings(level=Level.TOKEN, upper=2.0)


class Ranks:
    """A gloo group whose ranks are threads of this process."""

    def __init__(self, size: int):
        store, self.pool = dist.HashStore(), ThreadPoolExecutor(size)
        started = [self.pool.submit(dist.ProcessGroupGloo, store, i, size, timedelta(minutes=1)) for i in range(size)]
        self.groups = [future.result() for future in started]

    def attach(self, shards: list[TensorDict], settings: CorrectionSettings) -> list[Future]:
        return [
            self.pool.submit(attach_correction, shard, settings, group)
            for shard, group in zip(shards, self.groups, strict=True)
        ]


@pytest.fixture(scope="module")
def ranks() -> dict[int, Ranks]:
    return {size: Ranks(size) for size in (1, 2, 4)}


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def as_verl_sends(batch: cases.Batch, rows: slice = slice(None)) -> TensorDict:
    """These rows, jagged. What is outside the mask is NaN: nothing may read it."""
    outside = batch.mask == 0
    fields = {
        "old_log_probs": batch.old.masked_fill(outside, torch.nan),
        "rollout_log_probs": batch.rollout.masked_fill(outside, torch.nan),
        "response_mask": batch.mask,
        "loss_mask": batch.mask,
    }
    lengths = batch.lengths[rows].tolist()
    cut = {name: jagged([x[:n] for x, n in zip(field[rows], lengths, strict=True)]) for name, field in fields.items()}
    return TensorDict(cut, batch_size=len(lengths))


def uneven_parts(rows: int, shards: int, seed: int) -> list[slice]:
    order = torch.randperm(rows - 1, generator=torch.Generator().manual_seed(seed))
    edges = [0, *sorted((order[: shards - 1] + 1).tolist()), rows]
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def assert_metrics(ours: dict[str, float], verls: dict[str, float], settings: CorrectionSettings) -> None:
    """verl takes the deviation as sqrt(mean(w^2) - mean(w)^2) in float32, so variances are compared, relative to the
    mean square."""
    watched = {limit.metric for limit in limits(Precision.BF16, settings) if limit.metric.startswith("rollout_corr/")}
    assert watched <= ours.keys() <= verls.keys()
    for name, value in ours.items():
        expected, absolute = verls[name], 1e-6
        if name.endswith("_std"):
            value, expected = value**2, expected**2
            absolute *= verls["rollout_corr/rollout_is_mean"] ** 2 + expected
        assert value == pytest.approx(expected, rel=1e-5, abs=absolute), name


@pytest.mark.parametrize("name", cases.NODES)
def test_every_rank_gets_its_part_of_verls_answer_for_the_whole_batch(name, ranks):
    settings, drawn = CorrectionSettings.from_config(cases.NODES[name]), Counter()
    for seed in range(10):
        batch = cases.random_batch(seed)
        expected = cases.verl_answer(batch, cases.NODES[name])
        for size, group in ranks.items():
            if len(batch.old) < size:
                continue
            parts = uneven_parts(len(batch.old), size, seed)
            shards = [as_verl_sends(batch, rows) for rows in parts]
            for rows, data, metrics in zip(parts, shards, group.attach(shards, settings), strict=True):
                assert_metrics(metrics.result(), expected.metrics, settings)
                before, mask = (data[key].to_padded_tensor(0) for key in ("loss_mask", "response_mask"))
                width = int(batch.lengths[rows].max())
                # What is rejected leaves the loss and still counts in its mean.
                assert torch.equal(before, batch.mask[rows, :width])
                assert torch.equal(mask, expected.mask[rows, :width])
                drawn.update(empty=not before.any(), rejected=int((before > mask).sum()), kept=int(mask.sum()))
                assert ("rollout_is_weights" in data) == (settings.level is not None)
                if settings.level:
                    weights = data["rollout_is_weights"].to_padded_tensor(0)
                    torch.testing.assert_close(weights, expected.weights[rows, :width], rtol=1e-6, atol=1e-9)
                    assert settings.batch_normalize or weights.max() <= settings.upper
                    drawn.update(dropped=bool(before.any() and not weights.any()))
    # No batch of these was an easy one.
    assert drawn["empty"] and (drawn["dropped"] or settings.lower is None)
    assert not settings.rejections or min(drawn["rejected"], drawn["kept"]) > 0.05 * (drawn["rejected"] + drawn["kept"])


def test_the_mismatch_is_told_by_the_age_of_trajectories_and_is_all_of_it(ranks):
    batch = cases.random_batch(3)
    rows = len(batch.old)
    lags = torch.arange(rows) % 6
    parts = uneven_parts(rows, 4, 3)
    shards = [as_verl_sends(batch, part) for part in parts]
    for shard, part in zip(shards, parts, strict=True):
        shard[LAG] = lags[part].unsqueeze(1)
    answers = [future.result() for future in ranks[4].attach(shards, TIS)]
    assert all(answer == answers[0] for answer in answers) and not any(LAG in shard for shard in shards)
    metrics, mask = answers[0], batch.mask.bool()
    ratio = (batch.old - batch.rollout).double()
    shares = []
    for lag in range(4):
        of_lag = ratio[mask & (lags.clamp(max=3) == lag).unsqueeze(1)]
        shares.append(len(of_lag) / int(mask.sum()))
        assert metrics[f"rollout_corr/tokens_lag_{lag}"] == pytest.approx(shares[-1])
        assert metrics[f"rollout_corr/k3_kl_lag_{lag}"] == pytest.approx((of_lag.exp() - of_lag - 1).mean().item())
    by_lag = sum(share * metrics[f"rollout_corr/k3_kl_lag_{lag}"] for lag, share in enumerate(shares))
    assert sum(shares) == pytest.approx(1) and by_lag == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-5)


# ---- what cannot be corrected ----


def zeros(rows: int = 4) -> cases.Batch:
    lengths = torch.full((rows,), 3)
    return cases.Batch(torch.zeros(rows, 3), torch.zeros(rows, 3), torch.ones(rows, 3).long(), lengths)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field, remedy", [("rollout", "logprobs_mode"), ("old", "diverged")])
def test_log_probs_that_are_not_finite_on_one_rank_stop_all_of_them_by_one_message(ranks, field, remedy, value):
    batch = zeros()
    getattr(batch, field)[3, :2] = value
    for settings in (TIS, CorrectionSettings(level=None)):
        told = ranks[2].attach([as_verl_sends(batch, slice(0, 2)), as_verl_sends(batch, slice(2, 4))], settings)
        for error in (future.exception() for future in told):
            assert isinstance(error, FlashRLError)
            assert "2 of 12 response tokens have NaN" in str(error) and f"{field}_log_probs" in str(error)
            assert remedy in str(error)


def test_a_batch_without_a_token_is_refused():
    data = as_verl_sends(zeros()._replace(mask=torch.zeros(4, 3).long()))
    with pytest.raises(FlashRLError, match="no token inside response_mask"):
        attach_correction(data, TIS)


def test_rows_that_lack_log_probs_on_one_rank_stop_all_of_them(ranks):
    whole, cut, without = (as_verl_sends(zeros(2)) for _ in range(3))
    cut["rollout_log_probs"] = jagged([torch.zeros(3), torch.zeros(1)])
    for told in ranks[2].attach([whole, cut], TIS):
        with pytest.raises(FlashRLError, match="6 of 12 response tokens have NaN, infinite or no rollout_log_probs"):
            told.result()
    del without["rollout_log_probs"]
    with pytest.raises(ConfigError, match="calculate_log_probs"):
        attach_correction(without, TIS)
    assert attach_correction(without, CorrectionSettings(level=None)) == {}


def test_a_batch_that_icepop_drops_whole_has_zero_weights_and_no_effective_sample():
    """verl divides by zero here."""
    batch = zeros()
    settings = CorrectionSettings(level=Level.TOKEN, lower=0.5, upper=2.0, batch_normalize=True)
    answer = correct_shard(batch.old, batch.rollout - 5.0, batch.mask, settings)
    assert not answer.weights.any()
    names = ("eff_sample_size", "oob_ratio", "batch_norm_factor")
    assert [answer.metrics[f"rollout_corr/rollout_is_{name}"] for name in names] == [0.0, 1.0, 1.0]


def test_in_bypass_mode_the_batch_is_left_to_verls_loss():
    data = as_verl_sends(cases.random_batch(0))
    settings = CorrectionSettings.from_config({**cases.NODES["token TIS, two rejections"], "bypass_mode": True})
    assert attach_correction(data, settings) == {} and "rollout_is_weights" not in data
    assert torch.equal(data["response_mask"].values(), data["loss_mask"].values())
    old = data["old_log_probs"]  # which are the rollout's here
    values = torch.full_like(old.values(), torch.nan)
    for offsets in (old.offsets(), old.offsets() - (old.offsets() > 0).long()):  # NaN; and rows of other lengths
        data["old_log_probs"] = torch.nested.nested_tensor_from_jagged(values[: offsets[-1]], offsets=offsets)
        with pytest.raises(FlashRLError, match="NaN, infinite or no rollout_log_probs"):
            attach_correction(data, settings)
        values = torch.zeros_like(values)


# ---- verl's worker ----


@pytest.mark.parametrize("name", ["init_model", "update_actor"])
def test_what_the_worker_overrides_is_dispatched_as_verls(name):
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from flashrl_verl.trainer.worker import FlashRLWorker

    def dispatched(worker: type) -> dict:
        found = dict(getattr(getattr(worker, name), MAGIC_ATTR))
        if isinstance(mode := found["dispatch_mode"], dict):  # partial functions of verl's, by the mesh
            found["dispatch_mode"] = {key: (function.func, function.args) for key, function in mode.items()}
        return found

    assert dispatched(FlashRLWorker) == dispatched(ActorRolloutRefWorker)
