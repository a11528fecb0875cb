# SPDX-License-Identifier: Apache-2.0
"""``flashrl.fp32_lm_head=true``, checked: whatever would leave one side with another product is refused."""

from omegaconf import DictConfig

from flashrl_verl.rules import ACTOR, ROLLOUT, get, refuse, words

_MODEL = "actor_rollout_ref.model"
_KEY = "flashrl.fp32_lm_head"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "16": "float16", "fp32": "float32", "32": "float32"}
"""verl's other names for them (``PrecisionType``)."""


def check_head(cfg: DictConfig) -> None:
    """Refuse what the trainer's FP32 head cannot be combined with. Call it only when the switch is on.

    Args:
        cfg: verl's composed configuration.

    Raises:
        ConfigError: A key contradicts the switch.
    """
    if get(cfg, f"{_MODEL}.use_fused_kernels", False):
        refuse(
            f"{_MODEL}.use_fused_kernels",
            True,
            f"these kernels multiply by lm_head's weight themselves and round the logits to BF16, although {_KEY}=true; the "
            "rollout alone in FP32 would be further from the trainer than both in BF16",
            f"{_MODEL}.use_fused_kernels=false, or {_KEY}=false",
        )
    rollout = _dtype(get(cfg, f"{ROLLOUT}.dtype", "bfloat16"))
    key = f"{ACTOR}.fsdp_config.mixed_precision"
    trainer = _dtype((get(cfg, key) or {}).get("param_dtype", "bf16"))
    if trainer != rollout:
        refuse(
            f"{key}.param_dtype",
            trainer,
            f"the trainer would round lm_head's weight and input differently from {ROLLOUT}.dtype={words(rollout)}, and "
            f"{_KEY}=true promises the same product on both sides",
            f"{ROLLOUT}.dtype={trainer}, {key}.param_dtype={rollout}, or {_KEY}=false",
        )


def _dtype(name: object) -> str:
    return _DTYPES.get(str(name), str(name))
