# SPDX-License-Identifier: Apache-2.0
"""What a run asks of the environment is looked for before Ray starts; workers would find out a minute later.

Not part of ``validate_config``: a dry run may be made elsewhere.
"""

import os
import re
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import refuse
from flashrl_verl.settings import get, has_critic
from flashrl_verl.upstream.versions import find, version_of
from flashrl_verl.validation import ATTENTION, ENGINE, FLASH, MODEL_NODE, VARLEN, on_gpu

_LOGGERS = ("wandb", "mlflow", "swanlab", "clearml", "trackio", "tensorboard")
"""verl's trackers that need a package, of the same name."""
_KEYS = {
    "wandb": ("WANDB_API_KEY", "WANDB_MODE", "offline"),
    "swanlab": ("SWANLAB_API_KEY", "SWANLAB_MODE", "local"),
}
"""Those that need a key: its variable, and the variable and value by which they need none."""


def settle_packages(cfg: DictConfig) -> None:
    """Refuse what is not there. Where verl's default wants flash-attn and it is not there, ours is taken, and said.

    Args:
        cfg: changed in place.

    Raises:
        ConfigError: the run asks for what is not there.
    """
    _check_loggers(cfg)
    _check_engine_names(cfg)
    _check_variables()
    liger, packed = (f"{MODEL_NODE}.use_liger", f"{MODEL_NODE}.use_remove_padding")
    if get(cfg, liger) and find_spec("liger_kernel") is None:
        refuse(liger, True, "liger-kernel is not installed in this environment", f"pip install it, or {liger}=false")
    asked = get(cfg, ATTENTION)
    if not on_gpu(cfg) or asked not in (None, FLASH) or version_of("flash-attn"):
        return
    missing = "flash-attn is not installed in this environment"
    if asked:
        refuse(ATTENTION, asked, missing, f"leave it out, which takes {VARLEN}, or pip install it")
    if not get(cfg, packed, True):
        refuse(packed, False, f"{missing}, and {VARLEN} packs", f"+{ATTENTION}=sdpa")
    critics = "critic.model.override_config.attn_implementation"
    if has_critic(cfg) and get(cfg, critics, FLASH) == FLASH:
        refuse(critics, FLASH, missing, f"+{critics}=sdpa")
    OmegaConf.update(cfg, ATTENTION, VARLEN, force_add=True)
    newer = "FlashAttention 4 from Hopper on, else " if version_of("flash-attn-4") else ""
    print(f"flash-attn is not installed: {ATTENTION}={VARLEN}, {newer}PyTorch's own FlashAttention 2", file=sys.stderr)


def _check_loggers(cfg: DictConfig) -> None:
    import ray
    from requests.utils import get_netrc_auth  # as wandb itself looks

    key, loggers = "trainer.logger", get(cfg, "trainer.logger") or []
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name in _LOGGERS and find_spec(name) is None:
            refuse(key, name, f"{name} is not installed in this environment", "pip install it, or [console,file]")
        if name in _KEYS:
            variable, mode, offline = _KEYS[name]
            sent = {**os.environ, **(get(cfg, "ray_kwargs.ray_init.runtime_env.env_vars") or {})}
            if sent.get(variable) or sent.get(mode, "online") not in ("online", "cloud"):
                continue
            if os.environ.get("RAY_ADDRESS") and not ray.is_initialized():
                continue  # the trainer looks again, in the environment of its node's `ray start`
            if name == "swanlab" and (Path.home() / ".swanlab").exists():
                continue
            if name == "wandb" and get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")):
                continue
            refuse(key, name, f"{name} has no key here", f"{variable}=<key>, `{name} login`, or {mode}={offline}")


def _check_variables() -> None:
    name = "VLLM_ATTENTION_BACKEND"
    envs = Path(next(iter(find_spec("vllm").submodule_search_locations))) / "envs.py"
    if os.environ.get(name) and name not in envs.read_text():
        remedy = f"unset {name}, and +{ENGINE}.attention_backend=<name>"
        refuse(name, os.environ[name], f"vLLM {find('vllm').installed} does not read it any more", remedy)
    try:
        reach(address := os.environ.get("RAY_ADDRESS", ""))
    except OSError as error:
        remedy = "start the cluster (`ray start --head`), or unset RAY_ADDRESS for one of the run's own"
        refuse("RAY_ADDRESS", address, f"nobody answers there ({error})", remedy)


def reach(address: str) -> None:
    """Connect to a Ray address of host and port once, where Ray would try for minutes.

    Raises:
        OSError: nobody answers.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _check_engine_names(cfg: DictConfig) -> None:
    """By vLLM's source: to import it takes longer than all the rest."""
    folder = Path(next(iter(find_spec("vllm").submodule_search_locations)))
    sources = [folder / "engine" / "arg_utils.py", *(folder / "entrypoints").rglob("*cli_args.py")]
    text = "\n".join(source.read_text() for source in sources if source.is_file())
    known = {
        name.replace("-", "_") for name in re.findall(r"^    (\w+): |\"--?([\w-]+)\"", text, re.M) for name in name
    }
    for name, value in get(cfg, ENGINE, {}).items():
        argument = str(name).replace("-", "_").split(".")[0]
        positive = argument.removeprefix("no_")
        if value is not None and not any(each.startswith((argument, positive)) for each in known if each):
            reason = f"vLLM {find('vllm').installed} has no such argument"
            refuse(f"{ENGINE}.{name}", value, reason, f"remove {ENGINE}.{name}")
