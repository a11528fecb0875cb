# SPDX-License-Identifier: Apache-2.0
"""What the code names, for comparison with what documents name: its strings, its metrics, and the options of its
commands."""

import ast
import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import torch
import typer.main
import yaml

from flashrl_verl import cli
from flashrl_verl.correction.batch import correct_shard
from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.settings import Precision
from flashrl_verl.trainer.guard import limits
from flashrl_verl.trainer.metrics import PHASES, per_replica, phase_metrics

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flashrl_verl"
SITE = Path(next(iter(find_spec("verl").submodule_search_locations))).parent
"""Where verl and vLLM are installed."""

REPLICA = ("quantized_layers", "weight_bytes", "generated_tokens")
"""What is told of each replica of a mixture."""

_VALUE = "\0"
_JOINED = re.compile(r'"\s*\n\s*f?"')


@functools.cache
def messages() -> tuple[str, ...]:
    """Every string of the package that a program can print, f-strings and implicit concatenations whole, with a mark
    for each value in them."""
    return tuple(
        _text(node)
        for path in PACKAGE.rglob("*.py")
        for node in _expressions(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant) and _text(node)
    )


def _expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but strings that are statements: docstrings, and those below constants and fields."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return (node for node in ast.walk(tree) if id(node) not in documents or not isinstance(node, ast.Constant))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
    return node.value if isinstance(node.value, str) else ""


def says(quote: str) -> bool:
    """Whether one string of the package contains the words, ``…`` in them standing for anything."""
    pattern = re.compile(".*".join(map(re.escape, quote.split("…"))), re.DOTALL)
    return any(pattern.search(message) for message in messages())


@functools.cache
def upstream() -> str:
    """Source of verl, of the part of vLLM that speaks to users of an engine, of W&B's variables and of Ray's errors,
    which name its variables; broken strings joined."""
    others = (SITE / "wandb" / "env.py", SITE / "ray" / "exceptions.py")
    paths = [*(SITE / "verl").rglob("*.py"), *(SITE / "vllm" / "v1").rglob("*.py"), *others]
    return _JOINED.sub("", "\n".join(path.read_text() for path in paths))


@functools.cache
def source() -> str:
    """Everything that is ours and runs for a user: neither documents nor tests, which may name what is gone."""
    folders = {"flashrl_verl": ("*.py", "*.yaml"), "recipe": ("*.py", "*.sh"), "scripts": ("*.sh",)}
    paths = [path for folder, patterns in folders.items() for p in patterns for path in (ROOT / folder).rglob(p)]
    return "\n".join(path.read_text() for path in [*paths, ROOT / "setup.py"])


@functools.cache
def words() -> frozenset[str]:
    """Every word in the code, ours and upstream's."""
    return frozenset(re.findall(r"\w+", source())) | frozenset(re.findall(r"\w+", upstream()))


def correction_settings() -> list[CorrectionSettings]:
    """Those of every preset."""
    files = sorted((PACKAGE / "configs" / "correction").glob("*.yaml"))
    return [
        CorrectionSettings.from_config(yaml.safe_load(f.read_text())["algorithm"]["rollout_correction"]) for f in files
    ]


@functools.cache
def metrics_of_ours() -> frozenset[str]:
    """Names below ``flashrl/``: the literal ones, and those that are made of a phase or of a limit of the guard."""
    literal = re.findall(r'"(flashrl/\w+)"', "\n".join(path.read_text() for path in PACKAGE.rglob("*.py")))
    phases = phase_metrics(dict.fromkeys(PHASES, 1.0) | {"step": 20.0}, generated_tokens=1)
    watched = {limit.name for p in Precision for correction in correction_settings() for limit in limits(p, correction)}
    replica = [name for what in REPLICA for name in per_replica(what, [0])]
    return frozenset(
        {*literal, *phases, *replica, *(f"flashrl/guard_{name}_steps" for name in watched)} - {"flashrl/guard_"}
    )


@functools.cache
def metrics_of_the_correction() -> frozenset[str]:
    """Names below ``rollout_corr/`` that any preset makes of a batch."""
    log_probs, mask = torch.tensor([[-1.0, -2.0], [-1.0, -0.5]]), torch.ones(2, 2, dtype=torch.bool)
    settings = correction_settings()
    return frozenset(name for s in settings for name in correct_shard(log_probs, log_probs - 0.1, mask, s).metrics)


def metrics_of_a_run() -> frozenset[str]:
    """Names of verl's that a run of the recipe logged; ``tests/e2e/test_recipe.py`` compares them with a run."""
    return frozenset((ROOT / "tests" / "unit" / "snapshots" / "metrics.txt").read_text().split())


@functools.cache
def options() -> dict[str, frozenset[str]]:
    """Command of ``flashrl`` (two words below ``bench``) -> its options."""
    found: dict[str, frozenset[str]] = {}

    def visit(prefix: str, command: click.Command) -> None:
        for name, child in getattr(command, "commands", {}).items():
            visit(f"{prefix} {name}".strip(), child)
        found[prefix] = frozenset(option for p in command.params for option in (*p.opts, *p.secondary_opts)) | {
            "--help"
        }

    visit("", typer.main.get_command(cli.app))
    return found
