# SPDX-License-Identifier: Apache-2.0
"""A run is refused when the cluster cannot hold it; verl itself would wait without a word."""

import pytest

from flashrl_verl.cluster import check_gpus
from flashrl_verl.errors import ConfigError


@pytest.mark.parametrize("cluster", [[8.0] * 4, [8.0] * 5, [0.0, 8.0, 8.0, 8.0, 8.0], [16.0, 16.0]])
def test_a_cluster_that_holds_the_run_is_accepted(cluster):
    check_gpus(4, 8, cluster)


@pytest.mark.parametrize("cluster", [[], [0.0], [8.0] * 3, [4.0] * 8, [31.0]])
def test_too_few_gpus_on_a_node_are_refused_with_both_keys_and_the_count(cluster):
    with pytest.raises(ConfigError) as caught:
        check_gpus(4, 8, cluster)
    message = str(caught.value)
    assert "trainer.nnodes=4" in message and "trainer.n_gpus_per_node=8" in message and "\n" not in message
    assert f"has {sum(cluster):g} GPUs on {len(cluster)} node(s)" in message and "ray status" in message
