# SPDX-License-Identifier: Apache-2.0
"""A picture's file says what is drawn in it."""

import pytest
from result_pages import drawn

from flashrl_verl.tools.report.figure import new_figure, save


def picture(
    path,
    *,
    height=2.0,
    value=3.0,
    label="int8",
    title="speed",
    start=0.0,
    hatch=None,
    colour="green",
    shade="red",
    at=1,
    dot=1,
    dots="o",
):
    figure = new_figure(4, 2)
    axes = figure.subplots()
    axes.bar([0], [value], color=colour, label=label, hatch=hatch)
    axes.plot([start, 1], [1, height], marker=dots)
    axes.scatter([dot], [1])
    axes.fill_between([0, 1], [0, 0], [1, height], color=shade)
    axes.set_title(title)
    axes.annotate(f"{value:.2f}", (0, at))
    figure.legend(*axes.get_legend_handles_labels())
    save(figure, path)
    return drawn(path)


def test_the_same_drawing_has_the_same_source(tmp_path):
    assert picture(tmp_path / "one.png") == picture(tmp_path / "two.png")


OTHERS = [
    dict(height=2.5),
    dict(value=3.01),
    dict(label="fp8"),
    dict(title="speeds"),
    dict(start=0.5),
    dict(hatch="//"),
    dict(colour="red"),
    dict(shade="blue"),
    dict(at=2),
    dict(dot=2),
    dict(dots="s"),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_another_drawing_has_another(tmp_path, other):
    assert picture(tmp_path / "one.png") != picture(tmp_path / "two.png", **other)


def test_an_svg_has_the_same(tmp_path):
    source = picture(tmp_path / "one.png")
    with pytest.raises(AssertionError, match="does not say"):
        picture(tmp_path / "one.svg")  # not where a .png does
    assert f"<dc:source>{source}</dc:source>" in "".join((tmp_path / "one.svg").read_text().split())
