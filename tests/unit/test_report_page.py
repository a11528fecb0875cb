# SPDX-License-Identifier: Apache-2.0
"""The page is complete in itself and well-formed, whatever the runs are called; the command writes it."""

import base64
import io
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from report_runs import two_runs
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.tools.report import comparison, markdown, page, palette

VOID = {"meta", "link", "img", "rect", "line"}


@pytest.fixture
def two(tmp_path):
    return two_runs(tmp_path)


class Page(HTMLParser):
    """Elements with their attributes, and text; an end tag that does not fit fails."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), tag
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.elements if name == tag]


def test_the_page_is_well_formed_and_names_every_run(two):
    result = comparison.compare(two)
    parsed = Page(page.render(result))
    assert parsed.all("html") == [{"lang": "en"}] and len(parsed.all("title")) == len(parsed.all("h1")) == 1
    text = " ".join(parsed.words)
    for run in result.runs:
        assert text.count(run.label) >= 4  # title, both tables, runs
    tables = [result.summary, result.costs]
    scopes = [scope for table in tables for scope in ["col"] * len(table.header) + ["row"] * 2]
    assert [attrs.get("scope") for attrs in parsed.all("th")] == scopes
    images = parsed.all("img")
    assert len(images) == len(result.pictures) + 1
    for run in result.runs:
        assert sum(run.label in attrs["alt"] for attrs in images) == len(result.pictures)


def test_the_page_loads_nothing(two):
    text = page.render(comparison.compare(two))
    parsed = Page(text)
    assert not parsed.all("script") and "@import" not in text and "url(" not in text
    for _, attrs in parsed.elements:
        for name in ("src", "href", "srcset", "action", "data"):
            assert attrs.get(name, "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attrs)
    for attrs in parsed.all("img"):
        kind, _, data = attrs["src"].partition(";base64,")
        content = base64.b64decode(data)
        if kind == "data:image/png":
            Image.open(io.BytesIO(content)).verify()
        else:
            assert not re.search(rb'(href|src)="(?!#)|url\((?!#)|<script|<image', content)


def test_names_and_commands_cannot_become_markup(two):
    wicked = ["<script>alert(1)</script>", "a|b `c` [d](http://e) *f*"]
    result = comparison.compare(two, wicked)
    parsed = Page(page.render(result))
    assert not parsed.all("script") and wicked[0] in " ".join(parsed.words)
    text = markdown.render(result)
    assert "<script" not in text.replace("\\<", "")
    headers = [line for line in text.splitlines() if line.startswith("| run ")]
    bars = re.compile(r"(?<!\\)\|")
    rows = [line for line in text.splitlines() if line.startswith("| a\\|b")]
    assert len(headers) == len(rows) == 2
    for header, row in zip(headers, rows, strict=True):
        assert len(bars.findall(row)) == len(bars.findall(header)) and "\\[d\\](http://e)" in row


def test_a_command_is_a_block_that_scrolls_and_the_keyboard_reaches(two):
    parsed = Page(page.render(comparison.compare(two)))
    [block] = parsed.all("pre")  # the second run has no command
    assert (block["class"], block["tabindex"], block["role"]) == ("scroll", "0", "region") and "TIS" in block[
        "aria-label"
    ]
    assert "python -m x 'a|b' \\\n    y.z=1" in parsed.words


def test_what_markdown_points_at_is_written(two, tmp_path):
    written = comparison.write(comparison.compare(two), tmp_path / "out")
    assert [path.name for path in written] == ["report.html", "report.md", "overview.png"]
    text = written[1].read_text()
    links = re.findall(r"\]\((\S+?)\)", text)
    assert len(links) > 5
    for link in links:
        assert (tmp_path / "out" / link).is_file(), link


def test_the_command_compares_several_runs_and_keeps_its_ways_with_one(two, tmp_path):
    words = ["report", *map(str, two), "--output", str(tmp_path / "out"), "--name", "eight bits", "--name", "sixteen"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "eight bits" in result.output and "720.0" in result.output and "sixteen" in result.output
    assert (tmp_path / "out" / "report.html").is_file() and not (two[0] / "report.md").exists()
    assert CliRunner().invoke(app, ["report", str(two[0])]).exit_code == 0
    assert (two[0] / "report.md").is_file() and not (two[0] / "report.html").exists()


@pytest.mark.slow
def test_a_browser_shows_the_page_without_an_error(two, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    comparison.write(comparison.compare(two), tmp_path / "out")
    shot = tmp_path / "shot.png"
    common = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/b",
    ]
    file = (tmp_path / "out" / "report.html").as_uri()
    dom = subprocess.run([*common, "--dump-dom", file], capture_output=True, text=True, timeout=400, check=True)
    assert "INT8, TIS C=2" in dom.stdout and "dapo-bf16" in dom.stdout and "CONSOLE" not in dom.stderr
    size = "--window-size=1400,3000"
    drawn = subprocess.run(
        [*common, size, f"--screenshot={shot}", file], capture_output=True, text=True, timeout=400, check=True
    )
    assert "CONSOLE" not in drawn.stderr
    with Image.open(shot) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=math.prod(image.size))}
    for colour in palette.COLOURS[:2]:  # the SVG inside was drawn, not only the table's samples of it
        assert tuple(round(255 * c) for c in to_rgb(colour)) in colours
    assert (0x00, 0x22, 0x4E) in colours
