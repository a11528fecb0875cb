# SPDX-License-Identifier: Apache-2.0
"""A comparison as one HTML file that loads nothing: no script, no network, pictures inside."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

from flashrl_verl import __version__
from flashrl_verl.tools.report import costs
from flashrl_verl.tools.report.palette import DASHES, Style

if TYPE_CHECKING:
    from flashrl_verl.tools.report.arms import NamedRun
    from flashrl_verl.tools.report.comparison import Comparison, Picture
    from flashrl_verl.tools.report.summary import Summary

TITLE = "FlashRL runs compared"
SUMMARY_CAPTION = "As logged; means over all steps of a run. ESS: effective sample size of the importance weights."
STYLE = """\
:root { color-scheme: light dark; --page: #ffffff; --ink: #222222; --line: #cccccc; --band: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --page: #1b1b1b; --ink: #e6e6e6; --line: #4a4a4a; --band: #262626; } }
body { margin: 0 auto; max-width: 90rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.6rem; }
h2 { margin: 2.2rem 0 .8rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); font-size: 1.2rem; }
h3 { margin: 1.2rem 0 .3rem; font-size: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
caption { padding-bottom: .4rem; text-align: left; }
th, td { padding: .35rem .45rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { vertical-align: bottom; }
tbody tr:nth-child(odd) { background: var(--band); }
tbody th, td { white-space: nowrap; }
td.words { min-width: 6.5rem; white-space: normal; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(30rem, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; }
.pictures figure { max-width: 46rem; }
figure img { display: block; box-sizing: border-box; width: 100%; padding: .5rem; border: 1px solid var(--line);
  border-radius: 4px; background: #ffffff; }
figcaption, .notes { font-size: .875rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; font-size: .875rem; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .5rem .7rem; border-radius: 4px; background: var(--band);
  font: .8125rem/1.45 ui-monospace, monospace; }
"""


def render(comparison: Comparison) -> str:
    """The whole file."""
    notes = [*comparison.notes, *filter(None, [comparison.absent_line()])]
    body = [
        f"<h1>{TITLE}</h1>",
        f"<p>{_runs(len(comparison.runs))}, from their metrics files, by flashrl-verl {escape(__version__)}.</p>",
        _table(comparison.summary, "Summary of the runs", SUMMARY_CAPTION),
    ]
    if notes:
        body.append('<ul class="notes">\n' + "\n".join(f"<li>{escape(note)}</li>" for note in notes) + "\n</ul>")
    if comparison.overview is not None:
        image = _image("image/png", comparison.overview, comparison.overview_alt())
        body.append(f"<section>\n<h2>Overview</h2>\n<figure>\n{image}\n</figure>\n</section>")
    for title, pictures in comparison.sections():
        figures = "\n".join(map(_figure, pictures))
        body.append(f'<section>\n<h2>{escape(title)}</h2>\n<div class="pictures">\n{figures}\n</div>\n</section>')
    if comparison.costs is not None:
        table = _table(comparison.costs, costs.TITLE, costs.CAPTION)
        body.append(f"<section>\n<h2>{escape(costs.TITLE)}</h2>\n{table}\n</section>")
    body.append("<section>\n<h2>Runs</h2>")
    for run in comparison.runs:
        body.append(_run(run))
    body.append("</section>")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{TITLE}: {escape(', '.join(run.label for run in comparison.runs))}</title>",
            # Without it a browser asks the server for an icon.
            '<link rel="icon" href="data:,">',
            f"<style>\n{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _run(run: NamedRun) -> str:
    facts = [f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in run.report.facts()]
    if command := run.report.command():
        # Lines stay whole, for the clipboard: the block scrolls, and the keyboard can reach it.
        name = escape(f"Command of {run.label}")
        block = f'<pre class="scroll" role="region" aria-label="{name}" tabindex="0">{escape(command)}</pre>'
        facts.append(f"<dt>command</dt><dd>{block}</dd>")
    return "\n".join([f"<h3>{escape(run.label)}</h3>", "<dl>", *facts, "</dl>"])


def _table(summary: Summary, name: str, caption: str) -> str:
    head = "".join(f'<th scope="col">{escape(_arrows(name))}</th>' for name in summary.header)
    rows = "\n".join(
        f'<tr><th scope="row">{_line(style)} {escape(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for (name, *cells), style in zip(summary.rows, summary.styles, strict=True)
    )
    # A region with a name that the keyboard can reach: it scrolls sideways on a narrow screen.
    return (
        f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">\n<table>\n'
        f"<caption>{escape(caption)}</caption>\n"
        f"<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _cell(text: str) -> str:
    # Words may break, figures may not.
    return f"<td>{escape(_arrows(text))}</td>" if len(text) < 18 else f'<td class="words">{escape(_arrows(text))}</td>'


def _arrows(text: str) -> str:
    """A browser breaks a line within ``->``."""
    return text.replace("->", "\N{RIGHTWARDS ARROW}")


def _line(style: Style) -> str:
    """A piece of the run's line as the pictures draw it; on white, as there."""
    dash = f' stroke-dasharray="{DASHES[style.line]}"' if DASHES[style.line] else ""
    return (
        '<svg width="34" height="12" aria-hidden="true"><rect width="34" height="12" fill="#ffffff"/>'
        f'<line x1="1" y1="6" x2="33" y2="6" stroke="{style.colour}" stroke-width="3"{dash}/></svg>'
    )


def _figure(picture: Picture) -> str:
    image = _image("image/svg+xml", picture.svg, picture.alt)
    return f"<figure>\n{image}\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"


def _image(kind: str, data: bytes, alt: str) -> str:
    return f'<img src="data:{kind};base64,{base64.b64encode(data).decode("ascii")}" alt="{escape(alt)}">'
