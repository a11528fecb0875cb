# SPDX-License-Identifier: Apache-2.0
"""A comparison says what the runs' files say: figures worked out by hand, every run everywhere, nothing loaded from outside."""

import base64
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import FlashRLError
from flashrl_verl.report import arms, comparison, markdown, page, palette, panels
from flashrl_verl.report.pictures import Drawing

HELD_OUT = "val-core/toy_addition/acc/mean@1"
KL, ESS, CUT = "rollout_corr/k3_kl", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_is_ratio_fraction_high"
VOID = {"meta", "link", "img", "rect", "line"}


def metrics(score: float, seconds: tuple[float, ...], layers: int = 8, **more) -> list[str]:
    """Steps 0 to len(seconds) of a run: validated at both ends, 60 % of a step spent on the rollout."""
    lines = [json.dumps({"step": 0, "data": {HELD_OUT: 0.25}})]
    for step, s in enumerate(seconds, start=1):
        data = {"timing_s/step": s, "timing_s/gen": 0.6 * s, "timing_s/update_actor": 0.3 * s, "perf/throughput": 100.0 * step}
        data |= {KL: step * 1e-4, ESS: 1 - 0.01 * step, CUT: 0.001 * step, "rollout_corr/rollout_is_mean": 1.0}
        data |= {"critic/score/mean": score, "flashrl/quantized_layers": layers, "flashrl/refit_seconds": 0.1 * step, **more}
        lines.append(json.dumps({"step": step, "data": data | ({HELD_OUT: 0.75} if step == len(seconds) else {})}))
    return lines


def make_run(folder, lines, **facts):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if facts:
        correction = {"rollout_is": "token", "rollout_is_threshold": 2.0}
        (folder / "run.json").write_text(json.dumps({"precision": "int8", "correction": correction, **facts}))
    return folder


@pytest.fixture
def two(tmp_path):
    """INT8 with TIS as the quickstart records it, and a plain metrics file of a BF16 run without a correction."""
    int8 = make_run(tmp_path / "first", metrics(0.5, (4.0, 6.0)), seed=3, command="python -m x 'a|b'", total_steps=5)
    plain = [json.loads(line) for line in metrics(0.6, (2.0, 2.0, 2.0), layers=0)]
    for line in plain:
        line["data"] = {key: v for key, v in line["data"].items() if key not in (ESS, CUT) and "rollout_is" not in key}
    bf16 = tmp_path / "flashrl" / "dapo-bf16.jsonl"
    bf16.parent.mkdir()
    bf16.write_text("\n".join(map(json.dumps, plain)))
    return [int8, bf16]


def cells(result, row: int) -> dict[str, str]:
    return dict(zip(result.summary.header, result.summary.rows[row], strict=True))


# ---- figures ----


def test_the_table_is_what_the_files_say_by_hand(two):
    result = comparison.compare(two)
    first, second = cells(result, 0), cells(result, 1)
    assert first == {
        "run": "INT8, TIS C=2",
        "precision": "int8, 8 quantized layers",
        "correction": "TIS, cap C = 2.0, per token",
        "steps": "2",
        "held-out accuracy, first -> last": "0.250 -> 0.750",
        "best (step)": "0.750 (2)",
        "k3 KL, last": "2.00e-04",
        "ESS, last": "0.9800",
        "truncated, last": "0.002",
        "s/step, mean": "5.00",  # (4 + 6) / 2
        "updates/hour": "720.0",  # 3600 / 5
        "generation share": "60.0%",
        "refit s, mean": "0.15",
    }
    assert second["run"] == "dapo-bf16" and second["precision"] == "not quantized, 0 quantized layers"
    assert (second["steps"], second["updates/hour"], second["k3 KL, last"]) == ("3", "1800.0", "3.00e-04")
    assert second["ESS, last"] == second["truncated, last"] == "not logged"


def test_time_is_the_sum_of_step_times_and_a_resumed_step_counts_once(tmp_path):
    lines = [*metrics(0.5, (1800.0, 3600.0)), json.dumps({"step": 2, "data": {"timing_s/step": 1800.0, HELD_OUT: 0.5}})]
    [arm] = arms.load_arms([make_run(tmp_path / "run", lines)])
    drawn = arms.curve(arm, arms.of_key(HELD_OUT), against_time=True)
    assert (drawn.x, drawn.y) == ([0.0, 1.0], [0.25, 0.5])


def test_a_step_without_a_time_is_said(tmp_path):
    lines = [line for line in metrics(0.5, (4.0, 6.0, 8.0)) if '"step": 2' not in line]
    result = comparison.compare([make_run(tmp_path / "run", lines)])
    assert "run: 1 of 3 steps have no time in its file; training time lacks them." in result.notes
    assert cells(result, 0)["s/step, mean"] == "6.00"


def test_parts_of_a_step_add_up_to_it(two):
    run = arms.load_arms(two)[0].runs[0]
    parts = panels.step_parts(run.metrics)
    assert parts == pytest.approx({"rollout": 3.0, "actor update": 1.5, "other": 0.5})


def test_smoothing_is_the_mean_of_the_last_values_and_leaves_held_out_values_alone(two):
    assert arms.trailing_mean([1.0, 2.0, 6.0, 4.0], 3) == [1.0, 1.5, 3.0, 4.0]
    plain, smooth = comparison.compare(two), comparison.compare(two, smooth=2)
    assert plain.summary == smooth.summary
    drawn = {p.panel.name: [p.svg, q.svg] for p, q in zip(plain.pictures, smooth.pictures, strict=True)}
    assert drawn["mismatch_kl"][0] != drawn["mismatch_kl"][1]
    assert drawn["toy_addition_acc_mean_1_steps"][0] == drawn["toy_addition_acc_mean_1_steps"][1]
    assert any("last 2 values" in note for note in smooth.notes)


def test_a_group_is_drawn_as_mean_and_range_where_all_of_it_has_values(tmp_path):
    runs = [make_run(tmp_path / str(s), metrics(s / 10, (s,) * (s + 1)), seed=s) for s in (2, 4)]
    [arm] = arms.load_arms(runs, group=True)
    assert arm.label == "INT8, TIS C=2" and [run.label for run in arm.runs] == [f"INT8, TIS C=2, seed {s}" for s in (2, 4)]
    drawn = arms.curve(arm, arms.of_key("critic/score/mean"), against_time=False)
    assert drawn.x == [1.0, 2.0, 3.0] and drawn.y == pytest.approx([0.3] * 3)
    assert (drawn.low, drawn.high) == ([0.2] * 3, [0.4] * 3)
    by_time = arms.curve(arm, arms.of_key("critic/score/mean"), against_time=True)
    assert by_time.x == pytest.approx([step * 3 / 3600 for step in (1, 2, 3)])
    named = arms.load_arms([*runs, make_run(tmp_path / "c", metrics(0.5, (1.0,)))], ["a", "a", "b"], group=True)
    assert [(arm.label, len(arm.runs)) for arm in named] == [("a", 2), ("b", 1)]
    assert len(comparison.compare(runs, group=True).summary.rows) == 2


def test_values_that_are_not_finite_or_not_positive_are_drawn_and_said(tmp_path):
    lines = metrics(0.5, (4.0, 6.0)) + [json.dumps({"step": 3, "data": {KL: None}}), json.dumps({"step": 4, "data": {KL: 0.0}})]
    result = comparison.compare([make_run(tmp_path / "run", lines)])
    assert any("at 1 steps the mismatch KL is not above 0" in note for note in result.notes)
    broken = comparison.compare([make_run(tmp_path / "nan", [*lines, json.dumps({"step": 5, "data": {KL: None}})])])
    assert cells(broken, 0)["k3 KL, last"] == "NOT FINITE (nan)"


def test_runs_without_times_or_without_steps_are_shown_as_far_as_they_go(two, tmp_path):
    untimed = [re.sub(r'"timing_s/\w+": [\d.]+, ', "", line) for line in metrics(0.5, (4.0, 6.0))]
    only_validation = make_run(tmp_path / "validated", metrics(0.5, ()))
    alone = comparison.compare([make_run(tmp_path / "untimed", untimed), only_validation])
    assert not {panel.kind for panel in alone.panels} & {
        panels.Kind.OVER_TIME,
        panels.Kind.AGAINST_SPEED,
        panels.Kind.STEP_BARS,
    }
    assert alone.overview and cells(alone, 0)["updates/hour"] == "not logged"
    assert cells(alone, 1)["held-out accuracy, first -> last"] == "0.250 (step 0 only)"
    beside = comparison.compare([*two, tmp_path / "untimed"]).arms[-1]
    assert arms.curve(beside, arms.of_key(HELD_OUT), against_time=True).x == []


# ---- names and mistakes ----


def test_a_name_never_claims_a_precision_that_the_engine_did_not_hold(tmp_path):
    [arm] = arms.load_arms([make_run(tmp_path / "folder", metrics(0.5, (1.0,), layers=0), seed=0)])
    assert arm.label == "folder"
    shown = cells(comparison.compare([tmp_path / "folder"]), 0)
    assert shown["precision"].endswith("NOT the precision that was chosen")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_is": None, "rollout_is_threshold": None}, "no correction"),
        ({"rollout_is": "sequence", "rollout_is_threshold": 8}, "TIS C=8 per sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, "IcePop 0.5-5.0"),
    ],
)
def test_a_correction_is_named_in_a_few_words(settings, words):
    assert arms.short_correction(settings) == words


def test_names_are_unique_whatever_the_runs_have_in_common(tmp_path):
    lines = metrics(0.5, (1.0,))
    seeds = [make_run(tmp_path / f"s{seed}", lines, seed=seed) for seed in (0, 1)]
    assert [arm.label for arm in arms.load_arms(seeds)] == ["INT8, TIS C=2, seed 0", "INT8, TIS C=2, seed 1"]
    same = [*seeds, make_run(tmp_path / "again", lines, seed=1)]
    assert [arm.label for arm in arms.load_arms(same)] == [f"INT8, TIS C=2, {name}" for name in ("s0", "s1", "again")]
    deep = [make_run(tmp_path / a / "run", lines) for a in "ab"]
    assert [arm.label for arm in arms.load_arms(deep)] == ["run, run 1", "run, run 2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not there"),
        ("", "holds no step"),
        ("a,b\n1,2\n", r"line 1 is not \{\"step\": n"),
        ("\n\n[1]\n", "line 3 is not"),
    ],
)
def test_what_is_no_metrics_file_is_one_error(tmp_path, two, content, said):
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FlashRLError, match=said) as error:
        comparison.compare([*two, path])
    assert str(path) in str(error.value)


def test_the_same_file_twice_is_refused_also_by_another_path(two):
    with pytest.raises(FlashRLError, match="the same file as"):
        arms.load_arms([*two, two[0] / "metrics.jsonl"])


@pytest.mark.parametrize(
    ("names", "said"), [(["one"], "1 --name for 2 runs"), (["one", "one"], "occurs twice"), (["one", " "], "is empty")]
)
def test_names_that_do_not_fit_are_refused(two, names, said):
    with pytest.raises(FlashRLError, match=said):
        arms.load_arms(two, names)


def test_torn_lines_are_left_out_by_number(two):
    with open(two[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "da')
    notes = comparison.compare(two).notes
    assert "INT8, TIS C=2: 1 of its lines are no record and were left out (line 4)." in notes
    assert "INT8, TIS C=2: 2 of 5 planned steps." in notes


# ---- pictures ----


def test_a_panel_without_data_is_left_out_and_said_in_one_line(two):
    result = comparison.compare(two)
    names = {panel.name for panel in result.panels}
    assert {"mismatch_kl", "step_time", "refit_seconds", "throughput"} <= names
    assert not {"response_length", "code_change_rate", "correlation"} & names
    line = result.absent_line()
    assert "Response length" in line and "8-bit codes" in line and "\n" not in line
    assert line in markdown.render(result)


def test_the_guards_events_are_shown_and_its_counts_where_they_are_not_zero(two, tmp_path):
    counts = {"flashrl/guard_events": 2, "flashrl/guard_k3_kl_steps": 3, "flashrl/guard_correlation_steps": 0}
    result = comparison.compare([*two, make_run(tmp_path / "guarded", metrics(0.5, (1.0, 1.0), **counts))])
    assert [panel.name for panel in result.panels if "guard" in panel.name] == ["guard_events", "guard_k3_kl"]
    assert [cells(result, i)["guard events"] for i in range(3)] == ["not logged", "not logged", "2"]
    plain = comparison.compare(two)
    assert "guard events" not in plain.summary.header and "Guard events" in plain.absent


def test_a_run_has_its_colour_in_every_picture_that_has_its_values(two):
    result = comparison.compare(two)
    only_first = {"effective_sample_size", "truncated_share"}
    for picture in result.pictures:
        if picture.panel.kind is not panels.Kind.STEP_BARS:
            drawn = {colour for colour in palette.COLOURS if colour.lower() in picture.svg.decode().lower()}
            expected = palette.COLOURS[: 1 if picture.panel.name in only_first else 2]
            assert set(expected) <= drawn and not drawn & set(palette.COLOURS[4:]), picture.panel.name


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2, 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_arms_differ_without_their_colours():
    looks = [palette.style(i) for i in range(palette.DISTINCT)]
    assert len({(look.line, look.marker) for look in looks}) == palette.DISTINCT == 28
    for a, b in itertools.combinations(looks[:4], 2):
        assert a.line != b.line and a.marker != b.marker and a.colour != b.colour
    assert set(palette.DASHES) == set(palette.LINES)


def test_every_line_is_seen_on_white():
    for colour in palette.COLOURS[:5]:
        assert 1.05 / (luminance(colour) + 0.05) >= 2.9, colour  # WCAG 2 asks 3 of graphics


def test_parts_of_a_step_differ_from_their_neighbours_in_grey():
    order = [*palette.PHASES, "other"]
    assert set(order) == set(palette.SHADES)
    usual = ["gen", "old_log_prob", "adv", "update_actor", "update_weights", "other"]
    for a, b in [*itertools.pairwise(order), *itertools.pairwise(usual)]:
        (light, dark), hatches = (
            sorted((luminance(palette.SHADES[x][0]) for x in (a, b)), reverse=True),
            {palette.SHADES[x][1] for x in (a, b)},
        )
        assert (light + 0.05) / (dark + 0.05) > 1.5 or len(hatches) == 2, (a, b)


@pytest.mark.parametrize("runs", [1, 4, 9])
def test_legends_cover_no_data_and_no_text_is_cut(tmp_path, runs):
    paths = [make_run(tmp_path / f"a-rather-long-name-of-run-{i}", metrics(0.5, (3.0 + i, 4.0))) for i in range(runs)]
    loaded = arms.load_arms(paths)
    drawing, (there, _) = Drawing(arms=loaded), panels.panels(loaded)
    for figure in [drawing.overview_figure(there), *map(drawing.figure, there)]:
        figure.canvas.draw()
        inside = figure.bbox.padded(1)
        boxes = [axes.get_window_extent() for axes in figure.axes if axes.axison]
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        assert legends
        for legend in legends:
            extent = legend.get_window_extent()
            assert not any(extent.overlaps(box) for box in boxes)
            assert inside.x0 <= extent.x0 and extent.x1 <= inside.x1 and extent.y1 <= inside.y1
        for axes in figure.axes:
            drawn = axes.get_tightbbox(figure.canvas.get_renderer())  # with its title, labels and ticks
            assert inside.x0 <= drawn.x0 and drawn.x1 <= inside.x1, axes.get_title(loc="left")
            assert inside.y0 <= drawn.y0 and drawn.y1 <= inside.y1, axes.get_title(loc="left")


def test_every_plot_has_a_title_and_units(two):
    loaded = arms.load_arms(two)
    for panel in panels.panels(loaded)[0]:
        [axes] = Drawing(arms=loaded).figure(panel).axes
        assert axes.get_title(loc="left") and axes.get_xlabel()
        assert axes.get_ylabel() or panel.kind is panels.Kind.STEP_BARS


def test_the_same_runs_give_the_same_bytes(two):
    once, again = comparison.compare(two), comparison.compare(two)
    assert page.render(once) == page.render(again)


# ---- the page ----


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
        assert text.count(run.label) >= 3  # title, table, runs
    assert [attrs.get("scope") for attrs in parsed.all("th")] == ["col"] * len(result.summary.header) + ["row"] * 2
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
    [header] = [line for line in text.splitlines() if line.startswith("| run ")]
    bars = re.compile(r"(?<!\\)\|")
    [row] = [line for line in text.splitlines() if line.startswith("| a\\|b")]
    assert len(bars.findall(row)) == len(bars.findall(header)) and "\\[d\\](http://e)" in row


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
    dom = subprocess.run([*common, "--dump-dom", file], capture_output=True, text=True, timeout=120, check=True)
    assert "INT8, TIS C=2" in dom.stdout and "dapo-bf16" in dom.stdout and "CONSOLE" not in dom.stderr
    size = "--window-size=1400,3000"
    drawn = subprocess.run(
        [*common, size, f"--screenshot={shot}", file], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in drawn.stderr
    with Image.open(shot) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=math.prod(image.size))}
    for colour in palette.COLOURS[:2]:  # the SVG inside was drawn, not only the table's samples of it
        assert tuple(round(255 * c) for c in to_rgb(colour)) in colours
    assert (0x00, 0x22, 0x4E) in colours


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": 2.0}, "TIS C=2"),
        ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}, "IcePop 0.5-5.0 per sequence"),
        ({"rollout_is": None, "rollout_rs": "seq_mean_k1"}, "reject seq_mean_k1"),
        ({"rollout_is": "token", "rollout_is_threshold": 8.0, "rollout_rs": "token_k2"}, "TIS C=8, reject token_k2"),
        ({"rollout_is": None, "bypass_mode": True}, "bypass"),
        ({"rollout_is": None}, "no correction"),
    ],
)
def test_a_legend_tells_corrections_apart(settings, words):
    from flashrl_verl.report.arms import short_correction

    assert short_correction(settings) == words
