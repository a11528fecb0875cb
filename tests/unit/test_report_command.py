# SPDX-License-Identifier: Apache-2.0
"""A command in a report can be read, and does in a shell what it did when it was recorded."""

import json
import shlex
import subprocess

import pytest
from report_runs import make_run, metrics

from flashrl_verl.tools import report
from flashrl_verl.tools.report import comparison, markdown
from flashrl_verl.tools.report.command import broken_at_overrides

RECORDED = [
    "python",
    "-m",
    "recipe.flashrl.main_flashrl",
    "experiment=quickstart",
    "quickstart.assets='out/my assets'",
    "x.y=[1,2]",
]
WRITTEN = """\
python -m recipe.flashrl.main_flashrl \\
    experiment=quickstart \\
    "quickstart.assets='out/my assets'" \\
    'x.y=[1,2]'"""


def test_every_override_has_a_line_of_its_own():
    assert broken_at_overrides(shlex.join(RECORDED)) == WRITTEN


@pytest.mark.parametrize(
    "words",
    [
        RECORDED,
        ["python", "x.py", "+a=$HOME", "++b=`ls` !1", "~c", "~d=3", "--resume", "e@f=g", "hydra.searchpath=[pkg://a]"],
        ["python", "a='it''s'", "b='$HOME'", "c='!!'", "d='\\'", "e='\"'", "f=\n g", "", "h=  "],
        ["python"],
    ],
)
def test_a_shell_takes_it_as_it_was(words):
    broken = broken_at_overrides(shlex.join(words))
    told = subprocess.run(["bash", "-c", f"printf '%s\\0' {broken}"], capture_output=True, text=True, check=True).stdout
    assert told.split("\0")[:-1] == words


@pytest.mark.parametrize(
    "command", ["A='b c' python x y=1", "python x y=1 | tee log", "python 'x y=1", "", "python  x y=$HOME"]
)
def test_what_is_more_than_words_stays_as_it_is(command):
    assert broken_at_overrides(command) == command


def test_both_reports_hold_it_as_a_block_whatever_is_in_it(tmp_path):
    run = make_run(tmp_path / "run", metrics(0.5, (1.0,)), command=shlex.join(RECORDED))
    for text in (report.load(run).markdown(), markdown.render(comparison.compare([run]))):
        assert f"\n\n```bash\n{WRITTEN}\n```\n" in text
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"command": "python 'a=```'"}))
    assert "\n````bash\npython \\\n    'a=```'\n````\n" in report.load(run).markdown()
