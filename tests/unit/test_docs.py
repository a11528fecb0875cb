# SPDX-License-Identifier: Apache-2.0
"""What the documents point at exists: files, keys of the composed configuration, and the choices and defaults of the recipe."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from flashrl_verl.quickstart import compose
from flashrl_verl.run_directory import RESULTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flashrl_verl"
GROUPS = PACKAGE / "configs"
MANUALS = ["README.md", "CONTRIBUTING.md", "recipe/flashrl/README.md", "docs/security.md"]
DOCUMENTS = [*MANUALS, "CHANGELOG.md", "docs/LOG.md"]
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?<![\w./<>-])((?:flashrl_verl|recipe|requirements|scripts|tests|docs|configs)/[\w./*-]*\w)")
FILE = re.compile(r"[\w./*-]+\.(?:py|sh|md|txt|yaml|png)")
KEY = r"(?<![\w./+-])((?:{roots})(?:\.\w+)+)"
OVERRIDE = re.compile(r"(?<![\w./-])\+?([a-z]\w*(?:\.\w+)*)=")


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _rows(name: str, heading: str) -> list[list[str]]:
    """The cells of the last table of a section, without its header."""
    section = re.split(r"\n## ", _text(name).partition(f"\n## {heading}\n")[2])[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, heading
    return rows[2:]


@pytest.fixture(scope="module")
def configurations():
    """What the manuals talk about: DAPO-32B, base and the quickstart."""
    return {name: compose([f"experiment={name}"]) for name in ("dapo_qwen2.5_32b_int8", "base", "quickstart")}


def _keys(cfg) -> set[str]:
    """Every dotted key, nodes included."""
    found = set()

    def visit(prefix, node):
        for key, value in node.items():
            found.add(f"{prefix}{key}")
            if isinstance(value, dict):
                visit(f"{prefix}{key}.", value)

    visit("", OmegaConf.to_container(cfg, resolve=False))
    return found


@pytest.fixture(scope="module")
def keys(configurations):
    return set().union(*map(_keys, configurations.values()))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_local_links_resolve_and_nothing_is_left_to_fill_in(name):
    text = _text(name)
    assert "@@" not in text and "TODO" not in text
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / name).parent / link).exists(), link


def test_the_readme_stays_short():
    assert len(_text("README.md").splitlines()) < 200


# ---- files ----


def test_everything_in_the_table_of_files_exists():
    for names, told in _rows("README.md", "Files"):
        first, *beside = CODE.findall(names)
        assert list(ROOT.glob(first)), first
        for name in beside:
            assert list((ROOT / first).parent.glob(name)), f"{name}, beside {first}"
        for folder in re.findall(r"`([\w/]+)`", told):
            assert (ROOT / first / folder).is_dir(), f"{folder}, in {first}"


@pytest.mark.parametrize("name", MANUALS)
def test_files_named_in_the_manuals_exist(name):
    text = _text(name)
    named = {*PATH.findall(text), *(code for code in CODE.findall(text) if FILE.fullmatch(code))}
    named = {path for path in named if Path(path).name not in RESULTS}  # what a run writes
    assert named
    for path in named:
        assert any(list(folder.glob(path)) for folder in (ROOT, PACKAGE, (ROOT / name).parent)), path


# ---- keys ----


@pytest.mark.parametrize("name", MANUALS)
def test_keys_named_in_the_manuals_exist(name, configurations, keys):
    text = _text(name)
    if name == "recipe/flashrl/README.md":
        for old, _ in _rows(name, "Why V1 and not `RayDAPOTrainer`"):  # scripts for another trainer
            text = text.replace(old, "")
    roots = "|".join({root for cfg in configurations.values() for root in cfg})
    for key in re.findall(KEY.format(roots=roots), text):
        assert key in keys or FILE.fullmatch(key), key  # quickstart.py is no key


@pytest.mark.parametrize("name", MANUALS)
def test_overrides_named_in_the_manuals_are_keys_or_groups(name, keys):
    for code in CODE.findall(_text(name)):
        for word in OVERRIDE.findall(code):
            known = (GROUPS / word).is_dir() or any(f".{key}".endswith(f".{word}") for key in keys)
            assert known or f"+{word}=" in code, word


def test_overrides_of_the_recipe_have_the_choices_and_defaults_that_its_table_gives(configurations):
    base = (GROUPS / "experiment" / "base.yaml").read_text()
    for _, names, choices in _rows("recipe/flashrl/README.md", "Overrides"):
        default, *others = CODE.findall(choices)
        words = re.findall(r"`([\w.]+)=`", names)
        assert words
        for word in words:
            if (GROUPS / word).is_dir():
                assert {default, *others} == {path.stem for path in (GROUPS / word).glob("*.yaml")}, word
                assert word == "experiment" or f"- /{word}: {default}\n" in base, word
            else:
                value = OmegaConf.select(configurations["base"], word)
                assert yaml.safe_load(default) == value and value is not None, word
            if "in the 32B experiment" in choices:
                assert yaml.safe_load(others[0]) == OmegaConf.select(configurations["dapo_qwen2.5_32b_int8"], word), word
