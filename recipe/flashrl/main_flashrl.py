# SPDX-License-Identifier: Apache-2.0
"""Train with FlashRL rollouts on verl's V1 trainer.

    python -m recipe.flashrl.main_flashrl experiment=quickstart
    python -m recipe.flashrl.main_flashrl experiment=dapo_qwen2.5_32b_int8 --dry-run

Words are Hydra overrides. ``--dry-run`` checks the configuration, prints its difference to verl's defaults, and stops
before Ray or a model is touched. Hydra's own ``--cfg job --resolve`` prints all of it.
"""

import gc
import os
import sys
from pathlib import Path

try:
    from flashrl_verl.errors import environment_needed
except ModuleNotFoundError as error:  # a copy of the recipe, which has not the package beside it
    if error.name != "flashrl_verl":
        raise
    sys.exit(
        f"error: {sys.executable} has no module 'flashrl_verl'. Remedy: the environment of your verl and vLLM, and in "
        "it `pip install --no-deps -e <flashrl-verl>`"
    )

with environment_needed():
    import hydra
    from hydra.errors import ConfigCompositionException, OverrideParseException
    from omegaconf import DictConfig

    from flashrl_verl import input_files, platforms, run_environment, validation
    from flashrl_verl.errors import FlashRLError
    from flashrl_verl.launch import checked_runner, prepare
    from flashrl_verl.settings import MODEL, get
    from flashrl_verl.tools.dry_run import report
    from flashrl_verl.tools.recipe_process import at_home, hydra_message
    from flashrl_verl.upstream import versions

CONFIG_DIR = Path(__file__).resolve().parent / "config"


def train(cfg: DictConfig) -> None:
    """Check the configuration, settle the platform, then hand over to verl's own entry point.

    Args:
        cfg: The composed configuration, verl's keys and the ``flashrl`` node.

    Raises:
        ConfigError: The configuration contradicts itself, verl or this environment, or names a path that is not there.
        FlashRLError: verl does not load the plugin; it would hide that.
    """
    versions.require("vllm")
    settings = validation.validate_config(cfg)
    prepare(cfg, ship_code=settings.ship_code)
    input_files.check_files(cfg)
    run_environment.settle_packages(cfg)
    platforms.activate(cfg)

    # Imported only now: these modules make verl decide on its platform.
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.utils.device import auto_set_device

    from flashrl_verl.plugins.verl import require_registered

    require_registered()
    auto_set_device(cfg)
    validation.validate_by_verl(cfg)
    gc.enable()
    run_ppo(cfg, task_runner_class=checked_runner(TaskRunnerV1, cfg))


def dry_run(cfg: DictConfig) -> None:
    """Check the configuration and print how it differs from verl's defaults; start nothing.

    Args:
        cfg: The composed configuration.
    """
    settings = validation.validate_config(cfg)
    platforms.activate(cfg)
    validation.validate_by_verl(cfg)
    sys.stdout.write(report(cfg, settings))
    if missing := input_files.missing_paths(cfg):  # no error: a dry run need not happen where the run will
        here = f"not found on this machine (relative paths start at {Path.cwd()})"
        sys.stdout.write(f"Warning: {', '.join(missing)} {here}. Remedy: {input_files.OF_MISSING}.\n")
    input_files.check_what_is_there(cfg)
    if cfg.flashrl.ignore:
        sys.stdout.write(
            "Warning: whether the model has the layers to keep is known when the rollout engine has started.\n"
        )
    if not Path(model := get(cfg, MODEL)).is_dir():
        sys.stdout.write(f"Not looked at: the model, as {model} is no folder here.\n")
    sys.stdout.write(
        "Not looked at: GPUs (flashrl check), and whether model, KV cache (flashrl plan) and training fit them.\n"
    )
    files = f", but for what is not here ({len(missing)})" if missing else ""
    sys.stdout.write(f"The configuration is valid{files}. Nothing was started.\n")


def main() -> None:
    """Compose the configuration from the command line and run, or describe, the training."""
    gc.disable()  # what imports make stays: to look through it again and again takes a second
    try:
        versions.require("verl")  # before Hydra, whose own message about verl's missing configuration helps nobody
    except FlashRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    task = dry_run if "--dry-run" in sys.argv else train
    sys.argv = [at_home(word) for word in sys.argv if word != "--dry-run"]  # Hydra does not know the flag

    def run(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except FlashRLError as error:
            sys.exit(f"{type(error).__name__}: {error}")

    os.environ["HYDRA_FULL_ERROR"] = "1"  # an exception, not Hydra's own page of text
    try:
        hydra.main(config_path=str(CONFIG_DIR), config_name="flashrl_trainer", version_base=None)(run)()
    except (ConfigCompositionException, OverrideParseException) as error:
        sys.exit(f"ConfigError: {hydra_message(error)}")


if __name__ == "__main__":
    main()
