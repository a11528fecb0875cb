# SPDX-License-Identifier: Apache-2.0
"""The rollout's servers, checked: nothing that would ask them without their key, and as many as a mixture needs."""

from omegaconf import DictConfig

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.replicas import bf16_replicas
from flashrl_verl.rules import ROLLOUT, Rule, apply, get, one_of


def check_servers(cfg: DictConfig, settings: FlashRLConfig) -> None:
    """Refuse what the servers would refuse later, one scrape after the other, and a mixture of precisions that is none.

    Args:
        cfg: verl's composed configuration; its numbers of nodes, GPUs and ranks are checked already.
        settings: its ``flashrl`` node.

    Raises:
        ConfigError: A monitor is set that verl gives the servers' addresses, but no key; or so many replicas make no mixture.
    """
    apply(cfg, _MONITORS)
    if settings.bf16_replica_fraction:
        ranks = get(cfg, "trainer.nnodes") * get(cfg, "trainer.n_gpus_per_node")
        bf16_replicas(settings, ranks // get(cfg, f"{ROLLOUT}.tensor_model_parallel_size", 1))


def _has_no_insight(loggers: str | list[str]) -> bool:
    return "rl_insight" not in ([loggers] if isinstance(loggers, str) else loggers)


_SCRAPES = "it reads /metrics of the rollout's servers, which ask for a key that verl does not give it"
_MONITORS = (
    Rule(
        f"{ROLLOUT}.prometheus.enable",
        one_of(False),
        _SCRAPES,
        f"{ROLLOUT}.prometheus.enable=false, and a scrape job of your own with the key (docs/security.md)",
        False,
    ),
    Rule("trainer.logger", _has_no_insight, _SCRAPES, "trainer.logger without rl_insight", []),
)
