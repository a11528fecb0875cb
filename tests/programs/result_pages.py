# SPDX-License-Identifier: Apache-2.0
"""Pages in docs/results: their text, their tables, and the raw data beside them."""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def page(name: str) -> str:
    return (RESULTS / name).read_text()


def tables(name: str) -> list[list[list[str]]]:
    """Every table of a page as rows of cells, header first."""
    found, rows = [], []
    for line in [*page(name).splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


def raw(folder: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))]


def drawn(picture: Path) -> str:
    """What `flashrl_verl.tools.report.figure.save` says is drawn in a .png."""
    found = re.search(rb"tEXtSource\0([0-9a-f]{64})", picture.read_bytes())
    assert found, f"{picture} does not say what is drawn in it"
    return found[1].decode()
