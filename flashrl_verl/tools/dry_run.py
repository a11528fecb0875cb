# SPDX-License-Identifier: Apache-2.0
"""How a configuration differs from verl's defaults."""

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.errors import words
from flashrl_verl.settings import CORRECTION, FlashRLConfig, KVCache, Precision, get, leaves
from flashrl_verl.upstream.versions import verl_defaults


def report(cfg: DictConfig, settings: FlashRLConfig) -> str:
    """A table with one line for each key that differs from verl's defaults, and what the run comes to in a line."""
    rows = [("key", "verl's default", "this run"), *difference(cfg, OmegaConf.create(verl_defaults()))]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = (f"{key:<{widths[0]}}  {old:<{widths[1]}}  {new}\n" for key, old, new in rows)
    table = f"# Difference to verl's defaults: {len(rows) - 1} keys\n{''.join(lines)}\n"
    rotated = ", rotated" * (settings.precision is Precision.INT8 and settings.rotation)
    weights, kv_cache = settings.precision.value.upper(), "BF16" if settings.kv_cache is KVCache.AUTO else "INT8"
    return f"{table}Rollout: {weights} weights{rotated}, {kv_cache} KV cache. {_correction(cfg)}.\n"


def _correction(cfg: DictConfig) -> str:
    found = CorrectionSettings.from_config(get(cfg, CORRECTION))
    if found.bypass or found.level is None:
        return "Correction: " + ("verl's bypass mode" if found.bypass else found.rejections or "none")
    kind = "TIS" if found.lower is None else f"zero below {found.lower} and above"
    return f"Correction: a weight a {found.level.value}, {kind}, C = {found.upper}"


def difference(ours: DictConfig, defaults: DictConfig) -> list[tuple[str, str, str]]:
    """Rows of (key, verl's default, our value), in the order of our configuration; "-" where verl has no such key.

    A key differs where what is *written* differs, so that a value which verl derives from a changed one is not
    repeated. Shown are *resolved* values. A name that begins with _ is only there for others to refer to.
    """
    (written, shown), (default, shown_default) = (
        [leaves(OmegaConf.to_container(cfg, resolve=resolve)) for resolve in (False, True)] for cfg in (ours, defaults)
    )
    return [
        (key, words(shown_default.get(key, default.get(key, "-"))), words(shown.get(key, value)))
        for key, value in written.items()
        if (key not in default or default[key] != value) and not key.startswith("_")
    ]
