# SPDX-License-Identifier: Apache-2.0
"""What a comparison draws: every panel with data, runs that stay apart, nothing cut or covered."""

import itertools
import re
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_hex, to_rgb
from report_runs import cells, make_run, metrics, two_runs

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.report import arms, comparison, markdown, page, palette, panels
from flashrl_verl.tools.report.figure import new_figure
from flashrl_verl.tools.report.pictures import Drawing


@pytest.fixture
def two(tmp_path):
    return two_runs(tmp_path)


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


def test_percentages_of_a_step_are_its_parts_shares_and_can_be_read(two):
    loaded = arms.load_arms(two)
    [panel] = [panel for panel in panels.panels(loaded)[0] if panel.name == "step_time"]
    [axes] = Drawing(arms=loaded).figure(panel).axes
    shares = [text for text in axes.texts if text.get_text().endswith("%")]
    by_run = [[text.get_text() for text in shares if text.get_position()[1] == run] for run in (0, 1)]
    assert by_run == [["60%", "30%", "10%"], ["60%", "30%"]]  # 10 % of the shorter bar would be too narrow
    for text in shares:
        fill = to_hex(text.get_bbox_patch().get_facecolor())
        lighter, darker = sorted((luminance(fill), luminance(text.get_color())), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) > 4.5, fill  # of WCAG 2, for small text


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


def test_figures_are_set_up_in_one_place_which_says_the_remedy_without_matplotlib(monkeypatch):
    package = Path(comparison.__file__).parents[1]
    makers = [
        path.name
        for path in package.rglob("*.py")
        if re.search(r"backend_agg|matplotlib\.(pyplot|use)", path.read_text())
    ]
    assert makers == ["figure.py"]
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(FlashRLError, match="pip install 'matplotlib>=3.8'"):
        new_figure(1, 1)


def test_every_plot_has_a_title_and_units(two):
    loaded = arms.load_arms(two)
    for panel in panels.panels(loaded)[0]:
        [axes] = Drawing(arms=loaded).figure(panel).axes
        assert axes.get_title(loc="left") and axes.get_xlabel()
        assert axes.get_ylabel() or panel.kind is panels.Kind.STEP_BARS


def test_the_same_runs_give_the_same_bytes(two):
    once, again = comparison.compare(two), comparison.compare(two)
    assert page.render(once) == page.render(again)
