# SPDX-License-Identifier: Apache-2.0
"""A run is refused when the cluster cannot hold it; verl itself would wait without a word."""

import pytest
import ray
from omegaconf import OmegaConf

from flashrl_verl.cluster import check_cluster, check_gpus, checked_runner
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


@pytest.mark.parametrize("nothing", [0, -1, None])
@pytest.mark.parametrize("cluster", [[], [8.0]])
def test_a_run_of_nothing_is_refused_by_its_key(nothing, cluster):
    with pytest.raises(ConfigError, match="^trainer.nnodes="):
        check_gpus(nothing, 8, cluster)
    with pytest.raises(ConfigError, match="^trainer.n_gpus_per_node="):
        check_gpus(1, nothing, cluster)


# ---- a real cluster ----


@ray.remote(num_cpus=0)
class Runner:
    """In the place of verl's task runner: an actor that remembers what it was made with."""

    def __init__(self, *words, **more):
        self._made_with = words, more

    def made_with(self):
        return self._made_with


def _run(nodes: int, gpus: int):
    return OmegaConf.create({"trainer": {"nnodes": nodes, "n_gpus_per_node": gpus}})


def test_no_cluster_is_asked_before_the_runner_is_made():
    """verl initializes Ray in between."""
    before = ray.is_initialized()
    checked_runner(Runner, _run(1, 3)).options(name="later")
    assert ray.is_initialized() == before


@pytest.fixture(scope="module")
def one_node():
    """A Ray of this test's own: one node with two GPUs, which are logical as on the CPU platform."""
    ray.init("local", num_cpus=1, num_gpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (2, 1)])
def test_a_live_cluster_is_counted(one_node, nodes, gpus):
    check_cluster(_run(nodes, gpus))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 3), (2, 2), (3, 1)])
def test_a_live_cluster_that_is_too_small_is_refused(one_node, nodes, gpus):
    with pytest.raises(ConfigError, match=r"the Ray cluster has 2 GPUs on 1 node\(s\) \(2\)"):
        check_cluster(_run(nodes, gpus))


def test_a_runner_that_fits_is_made_with_its_arguments_and_options(one_node):
    runner = checked_runner(Runner, _run(1, 2))
    assert ray.get(runner.remote("word", key=1).made_with.remote()) == (("word",), {"key": 1})
    actor = runner.options(name="named").remote("again")
    assert ray.get(ray.get_actor("named").made_with.remote()) == (("again",), {})
    ray.kill(actor)


def test_a_runner_that_does_not_fit_is_refused_and_not_made(one_node):
    runner = checked_runner(Runner, _run(1, 3))
    for made in (runner, runner.options(name="refused")):
        with pytest.raises(ConfigError, match="trainer.n_gpus_per_node=3 is refused"):
            made.remote()
    with pytest.raises(ValueError, match="refused"):
        ray.get_actor("refused")
