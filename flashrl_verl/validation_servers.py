# SPDX-License-Identifier: Apache-2.0
"""The rollout's servers, checked: nothing that would ask them without their key."""

from omegaconf import DictConfig

from flashrl_verl.rules import ROLLOUT, Rule, apply, one_of


def check_servers(cfg: DictConfig) -> None:
    """Refuse what the servers would refuse later, one scrape after the other.

    Args:
        cfg: verl's composed configuration.

    Raises:
        ConfigError: A monitor is set that verl gives the servers' addresses, but no key.
    """
    apply(cfg, _MONITORS)


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
