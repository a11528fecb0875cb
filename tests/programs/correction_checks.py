# SPDX-License-Identifier: Apache-2.0
"""Our weights and metrics against verl's: how near is the same."""

import pytest
import torch


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
