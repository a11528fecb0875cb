# SPDX-License-Identifier: Apache-2.0
"""Several results of `flashrl bench rollout` side by side: ratios by hand, within one measurement,
model, memory and work."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.rollout_figure import COLUMNS, LABEL_WIDTH, _draw, bars, notes, rows, unit_of
from benchmarks.rollout_files import names
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.report.figure import new_figure

WORKS = [{"sequences": 10, "prompt": 100, "response": 51}, {"sequences": 2, "prompt": 8, "response": 3}]


def results(
    folder: Path, model="qwen2.5-7b", share=0.9, arms=("bf16", "int8 + int8_per_token_head KV"), seconds=(6.0, 3.0)
) -> Path:
    """As `flashrl bench rollout` writes them; the prefill of the second work took as long as the whole."""
    settings = dict(
        model=model, works=WORKS, repeats=1, gpu_memory_utilization=share, tensor_parallel=1, max_num_seqs=64,
        max_num_batched_tokens=512, layers=None, seed=0,
    )  # fmt: skip
    head = {
        "settings": settings | {"config.json": {}},
        "environment": {"device": "NVIDIA H200", "memory_bytes": 100 << 30},
    }
    lines = [head]
    for arm, s in zip(arms, seconds, strict=True):
        timings = [
            {"work": [10, 100, 51], "seconds": [s], "prefill_seconds": [1.0]},
            {"work": [2, 8, 3], "seconds": [1.0], "prefill_seconds": [1.0]},
        ]
        answer = dict(layers={}, memory={"kv_tokens": 1000 * int(s)}, weights={}, device={}, timings=timings)
        lines.append({"round": 0, "arm": arm, "answer": answer})
    folder.mkdir()
    (folder / "rollout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_ratios_are_to_bf16_at_the_same_model_memory_and_work(tmp_path):
    full, small = results(tmp_path / "full"), results(tmp_path / "small", share=0.5, seconds=(12.0, 3.0))
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows([*bars(full), *bars(small)])]
    assert [row["memory GiB"] for row in table] == ["90"] * 4 + ["50"] * 4
    first, second, _, unknown = table[:4]
    assert (first["tokens/s"], first["x BF16"], first["sequences fit"]) == (
        "85 (85-85)",
        "1.00",
        "39",
    )  # 510 / 6; 6000 / 151
    # 6 s for 3, and 5 s of decoding for 2.
    assert (second["arm"], second["x BF16"], second["decode x BF16"]) == (
        "int8 + int8_per_token_head KV",
        "2.00",
        "2.50",
    )
    assert (unknown["x BF16"], unknown["decode x BF16"]) == ("1.00", "-")
    assert (table[5]["x BF16"], table[5]["decode x BF16"]) == ("4.00", "5.50")


def test_ratios_are_to_bf16_of_the_same_measurement(tmp_path):
    first, again = results(tmp_path / "first"), results(tmp_path / "again", seconds=(8.0, 2.0))
    alone = results(tmp_path / "alone", model="qwen2.5-14b", arms=("int8",), seconds=(1.0,))
    table = [
        dict(zip(COLUMNS, row, strict=True)) for row in rows([b for path in (first, again, alone) for b in bars(path)])
    ]
    assert [(row["model"], row["x BF16"]) for row in table if row["work"].startswith("10 x")] == [
        ("qwen2.5-7b (first)", "1.00"),
        ("qwen2.5-7b (first)", "2.00"),
        ("qwen2.5-7b (again)", "1.00"),
        ("qwen2.5-7b (again)", "4.00"),
        ("qwen2.5-14b", "-"),
    ]


def test_only_what_was_measured_twice_is_called_by_its_measurement(tmp_path):
    first, again = bars(results(tmp_path / "first")), bars(results(tmp_path / "again"))
    found = [*first, *(bar for bar in again if bar.work.sequences == 2)]
    assert [row[0] for row in rows(found)] == ["qwen2.5-7b"] * 2 + ["qwen2.5-7b (first)"] * 2 + [
        "qwen2.5-7b (again)"
    ] * 2


def test_without_bf16_there_is_no_ratio(tmp_path):
    (row, _) = rows(bars(results(tmp_path / "one", arms=("int8",), seconds=(3.0,))))
    assert dict(zip(COLUMNS, row, strict=True))["x BF16"] == "-"


def test_speeds_are_drawn_as_multiples_of_bf16_or_of_what_was_measured_everywhere(tmp_path):
    both, alone = bars(results(tmp_path / "both")), bars(results(tmp_path / "alone", arms=("int8", "fp8")))
    assert str(unit_of(both)) == "bf16" and str(unit_of(alone)) == "int8"
    missing = [bar for bar in alone if (str(bar.arm), bar.work.sequences) != ("int8", 2)]
    assert str(unit_of(missing)) == "fp8" and unit_of([*missing[:1], *missing[2:]]) is None


def test_speeds_are_written_where_they_can_be_read(tmp_path):
    """Within the bars that are as high as one another, else above."""
    panel = bars(results(tmp_path / "run"))
    for unit, inside in ((unit_of(panel), 2), (None, 0)):
        axes = new_figure(4, 3).subplots()
        _draw(axes, panel, unit, 0.4, 2)
        heights = {round(bar.get_x() + bar.get_width() / 2, 6): bar.get_height() for bar in axes.patches}
        within = [text for text in axes.texts if text.xy[1] < heights[round(text.xy[0], 6)]]
        assert len(axes.texts) == 4 and len(within) == inside
        assert all((text.get_color() == "white") is (text in within) for text in axes.texts)


def test_two_folders_of_one_name_are_told_apart(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    found = [bar for place in ("a", "b") for bar in bars(results(tmp_path / place / "run"))]
    assert {row[0] for row in rows(found)} == {"qwen2.5-7b (a)", "qwen2.5-7b (b)"}


@pytest.mark.parametrize(
    ("runs", "called"),
    [
        (["/r/throughput/7b.jsonl", "/r/throughput/again/7b.jsonl"], ["throughput", "throughput/again"]),
        (["/r/a/run/rollout.jsonl", "/r/b/run/rollout.jsonl"], ["a", "b"]),
        (["/r/7b-a/run.jsonl", "/r/7b-b/run.jsonl"], ["a", "b"]),
        (["/r/a/run.jsonl", "/r/a/run/rollout.jsonl"], ["run.jsonl", "run/rollout.jsonl"]),  # a copy beside the folder
        (["/r/32b-four.jsonl", "/r/again/32b.jsonl"], ["32b-four", "again/32b"]),
        (["/run/rollout.jsonl", "/a/run/rollout.jsonl"], ["/run/rollout.jsonl", "/a/run/rollout.jsonl"]),  # "" and "a"
    ],
)
def test_files_are_called_by_what_differs(runs, called):
    assert names([*map(Path, runs)]) == dict(zip(map(Path, runs), called, strict=True))


def test_one_folder_may_be_named_from_here_and_the_other_from_the_root(tmp_path, monkeypatch):
    here, there = results(tmp_path / "here"), results(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    found = [*bars(Path(here.name)), *bars(there)]
    assert {row[0] for row in rows(found)} == {"qwen2.5-7b (here)", "qwen2.5-7b (there)"}


def test_the_command_writes_picture_and_table(tmp_path):
    folders = [str(results(tmp_path / name, model=name)) for name in ("qwen2.5-7b", "qwen2.5-14b")]
    done = CliRunner().invoke(app, ["rollout-figure", *folders, "--output", str(tmp_path / "out" / "r.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "r.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "r.md").read_text().count("qwen2.5-14b") == 4


def figure(*words: object) -> str:
    """What the command refuses."""
    done = CliRunner().invoke(app, ["rollout-figure", *map(str, words)])
    assert done.exit_code != 0
    return f"{done.output}{done.exception}"


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path):
    assert "it ends in neither .png nor .svg" in figure(results(tmp_path / "run"), "--output", tmp_path / "r.pic")
    assert not (tmp_path / "r.md").exists()


def test_a_page_beside_the_picture_is_not_replaced_by_the_table(tmp_path):
    run, page = results(tmp_path / "run"), tmp_path / "r.md"
    page.write_text("# A page\n")
    assert "is something else" in figure(run, "--output", tmp_path / "r.png")
    assert page.read_text() == "# A page\n" and not (tmp_path / "r.png").exists()
    page.unlink()
    for _ in range(2):  # the table itself is made anew
        assert CliRunner().invoke(app, ["rollout-figure", str(run), "--output", str(tmp_path / "r.png")]).exit_code == 0
    page.unlink()
    page.mkdir()
    assert "Is a directory" in figure(run, "--output", tmp_path / "r.png")
    assert "cannot be written" in figure(run, "--output", "/proc/r.png")  # a folder in which nothing can be made


def test_what_cannot_be_compared_is_refused_with_its_reason(tmp_path):
    run, picture = results(tmp_path / "run"), tmp_path / "r.png"
    assert "Give each run once" in figure(run, run / "rollout.jsonl", "--output", picture)
    assert "is not there" in figure(tmp_path / "nothing", "--output", picture)
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "7b.jsonl").write_bytes((run / "rollout.jsonl").read_bytes())
    assert "has no rollout.jsonl, but 7b.jsonl: name what is meant" in figure(tmp_path / "copies", "--output", picture)
    head = (run / "rollout.jsonl").read_text().splitlines()[0]
    (run / "rollout.jsonl").write_text(head + "\n")
    assert "no engine has been measured to its end" in figure(run, "--output", picture)
    assert not picture.exists()


def test_an_arm_whose_line_is_cut_off_is_named_as_left_out(tmp_path):
    file = results(tmp_path / "run") / "rollout.jsonl"
    assert notes(file) == []
    file.write_text(file.read_text()[:-9])
    assert "its last line is cut off" in notes(file)[0] and {str(bar.arm) for bar in bars(file)} == {"bf16"}


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n"])
def test_what_is_no_result_is_named(tmp_path, text):
    (tmp_path / "rollout.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no results of flashrl bench rollout.*--output"):
        bars(tmp_path)


def test_measurements_of_the_same_work_are_called_by_what_differs(tmp_path):
    found = [bar for name in ("32b-first", "32b-again", "32b-fourth") for bar in bars(results(tmp_path / name))]
    assert {row[0] for row in rows(found)} == {"qwen2.5-7b (first)", "qwen2.5-7b (again)", "qwen2.5-7b (fourth)"}


def test_long_names_below_the_bars_stay_apart(tmp_path):
    near, far = tmp_path / "near", tmp_path / "of" / "another" / "folder"
    near.mkdir()
    far.mkdir(parents=True)
    found = [*bars(results(near / "a-long-name-of-one")), *bars(results(far / "another-long-name"))]
    axes = new_figure(8, 3).subplots()
    _draw(axes, found, unit_of(found), 0.3, 4)
    labels = [label.get_text().splitlines() for label in axes.get_xticklabels()]
    assert (
        max(map(len, sum(labels, []))) <= LABEL_WIDTH
        and labels[0][0] == "qwen2.5-7b"
        and labels[0][-1] == "10 x (100 -> 51)"
    )
    assert "".join(labels[0][1:-1]) == "(near/a-long-name-of-one)" and "".join(labels[-1][1:-1]).startswith(
        "(of/another/"
    )


def test_measurements_of_the_same_work_stand_beside_each_other(tmp_path):
    found = [*bars(results(tmp_path / "one")), *bars(results(tmp_path / "two"))]
    axes = new_figure(8, 3).subplots()
    _draw(axes, found, unit_of(found), 0.3, 4)
    labels = [label.get_text().split("\n")[1:] for label in axes.get_xticklabels()]
    works = ["10 x (100 -> 51)"] * 2 + ["2 x (8 -> 3)"] * 2
    assert labels == [[f"({name})", work] for name, work in zip(("one", "two") * 2, works, strict=True)]
