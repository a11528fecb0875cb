# SPDX-License-Identifier: Apache-2.0
"""A picture's file says what is drawn in it."""

import pytest
from result_pages import drawn

from flashrl_verl.report.figure import new_figure, save


def picture(path, *, height=2.0, value=3.0, label="int8", title="speed", start=0.0, hatch=None, size=4.0, colour="green"):
    figure = new_figure(size, 2)
    axes = figure.subplots()
    axes.bar([0], [value], color=colour, label=label, hatch=hatch)
    axes.plot([start, 1], [1, height])
    axes.fill_between([0, 1], [0, 0], [1, height])
    axes.set_title(title)
    axes.annotate(f"{value:.2f}", (0, 1))
    figure.legend(*axes.get_legend_handles_labels())
    save(figure, path)
    return drawn(path)


def test_the_same_drawing_has_the_same_source(tmp_path):
    assert picture(tmp_path / "one.png") == picture(tmp_path / "two.png")


@pytest.mark.parametrize(
    "other",
    [
        dict(height=2.5),
        dict(value=3.01),
        dict(label="fp8"),
        dict(title="speeds"),
        dict(start=0.5),
        dict(hatch="//"),
        dict(colour="red"),
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_drawing_has_another(tmp_path, other):
    assert picture(tmp_path / "one.png") != picture(tmp_path / "two.png", **other)


def test_an_svg_has_it_too(tmp_path):
    with pytest.raises(AssertionError, match="does not say"):
        picture(tmp_path / "one.svg")  # as a .png does not
    assert "<dc:source>" in (tmp_path / "one.svg").read_text()
