# SPDX-License-Identifier: Apache-2.0
"""The correction in the actor's batch: jagged as verl's own fields, dispatched, collected and reduced as verl's metrics."""

from __future__ import annotations

import correction_cases as cases
import pytest
import torch
from correction_checks import assert_metrics_equal, assert_weights_equal
from tensordict import TensorDict

from flashrl_verl.correction_settings import CorrectionSettings, Level
from flashrl_verl.errors import ConfigError, FlashRLError

TIS = CorrectionSettings(level=Level.TOKEN, upper=2.0)


def jagged(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = [row[:n] for row, n in zip(padded, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_bypass_mode_attaches_nothing() -> None:
    from flashrl_verl.actor import attach_correction

    batch = cases.random_batch(0)
    fields = dict(zip(("old_log_probs", "rollout_log_probs", "response_mask"), batch[:3], strict=True))
    data = TensorDict({name: field.clone() for name, field in fields.items()}, batch_size=len(batch.old))
    settings = CorrectionSettings.from_config({**cases.NODES["token TIS, two rejections"], "bypass_mode": True})
    assert attach_correction(data, settings) == {}
    assert set(data.keys()) == set(fields) and torch.equal(data["response_mask"], batch.mask)


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


@pytest.mark.parametrize("name", ["update_actor", "compute_log_prob", "compute_ref_log_prob"])
def test_what_is_overridden_is_dispatched_as_verls(name: str) -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from flashrl_verl.actor import FlashRLActorWorker

    method, original = getattr(FlashRLActorWorker, name), getattr(ActorRolloutRefWorker, name)
    assert method is not original
    ours, verls = getattr(method, MAGIC_ATTR), getattr(original, MAGIC_ATTR)
    assert ours.keys() == verls.keys()
    assert (ours["execute_mode"], ours["blocking"]) == (verls["execute_mode"], verls["blocking"])
    assert ours["dispatch_mode"].keys() == verls["dispatch_mode"].keys()
    for key, function in verls["dispatch_mode"].items():
        assert (ours["dispatch_mode"][key].func, ours["dispatch_mode"][key].args) == (
            function.func,
            function.args,
        )


def rows_with_objects(images: list) -> TensorDict:
    """Three rows as verl's transfer queue delivers them: jagged columns, objects by row, one value for all."""
    from verl.utils import tensordict_utils as tu

    tokens = torch.nested.as_nested_tensor([torch.arange(n) for n in (2, 3, 1)], layout=torch.jagged)
    data = TensorDict({"input_ids": tokens, "weights": torch.rand(3)}, batch_size=[3])
    for name in ("raw_prompt", "extra_info", "my_column"):
        tu.assign_non_tensor_stack(data, name, [{"row": i} for i in range(3)])
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", images)
    tu.assign_non_tensor_data(data, "temperature", 0.5)
    tu.assign_non_tensor_data(data, "global_token_num", [2, 3, 1])
    return data


def test_the_engine_gets_tensors_and_settings_and_no_objects_by_row() -> None:
    from verl.utils import tensordict_utils as tu

    from flashrl_verl.actor import without_objects

    data = rows_with_objects([{}, {}, {}])
    left = without_objects(data)
    assert set(left.keys()) == {"input_ids", "weights", "temperature", "global_token_num"}
    assert left["input_ids"] is data["input_ids"] and left["weights"].data_ptr() == data["weights"].data_ptr()
    assert tu.get(left, "temperature") == 0.5 and tu.get(left, "global_token_num") == [2, 3, 1]
    assert "raw_prompt" in data and len(data.keys()) == 8
    parts = tu.chunk_tensordict(left, 3)
    assert [part["input_ids"].values().tolist() for part in parts] == [[0, 1], [0, 1, 2], [0]]


def test_images_of_some_rows_are_kept() -> None:
    from verl.workers.engine.fsdp.transformer_impl import extract_multi_modal_inputs

    from flashrl_verl.actor import without_objects

    left = without_objects(rows_with_objects([{}, {"pixel_values": torch.ones(2, 4)}, {}]))
    assert set(left.keys()) == {"input_ids", "weights", "temperature", "global_token_num", "multi_modal_inputs"}
    assert extract_multi_modal_inputs(left["multi_modal_inputs"])["pixel_values"].shape == (2, 4)


def test_a_column_that_has_a_tensor_in_some_rows_only_is_left_for_verls_engine_to_see() -> None:
    from tensordict import NonTensorData, NonTensorStack

    from flashrl_verl.actor import without_objects

    data = rows_with_objects([{}, {}, {}])
    rows = [NonTensorData(None), NonTensorData(torch.ones(2)), NonTensorData(None)]
    data["routed_experts"] = NonTensorStack.from_list(rows)
    assert "routed_experts" in without_objects(data)
