# SPDX-License-Identifier: Apache-2.0
"""Prepared files: made once, whole or not at all, never over what is not theirs; the record tells when one was
changed."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from published_data import (
    ROOT,
    aime_rows,
    command,
    dapo_rows,
    environment,
    gsm8k_folder,
    math_row,
    write_parquet,
)
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError, DataError
from flashrl_verl.tools.data.bar import PLAIN_INTERVAL, Bar
from flashrl_verl.tools.data.verl_file import ABANDONED_AFTER


def data(*words):
    """`flashrl data`, in this process; its output, or the error it ends with."""
    result = CliRunner().invoke(app, ["data", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def source(tmp_path):
    return write_parquet(tmp_path / "published.parquet", dapo_rows(6, copies=3))


@pytest.fixture
def made(tmp_path, source):
    """A prepared file and its record."""
    data("dapo-math-17k", "--source", source, "--output", tmp_path / "data")
    return tmp_path / "data" / "dapo-math-17k.parquet", tmp_path / "data" / "dapo-math-17k.json"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- the record ----


def test_the_record_says_what_the_file_was_made_of_and_both_checksums(source, made):
    record = json.loads(made[1].read_text())
    for part, path in (("source", source), ("output", made[0])):
        said = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
        assert record[part]["sha256"] == said and record[part]["bytes"] == path.stat().st_size
    assert record["source"] | {"sha256": 0, "bytes": 0} == {
        "name": str(source), "file": str(source), "revision": None, "sha256": 0, "bytes": 0, "rows": 18,
        "published": False,
    }  # fmt: skip
    assert (record["dataset"], record["split"]) == ("dapo-math-17k", "train")
    assert (record["output"]["rows"], record["output"]["prompts"]) == (6, 6)
    assert set(record["output"]["columns"]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert record["versions"]["pyarrow"] == sys.modules["pyarrow"].__version__


def test_the_same_source_gives_the_same_bytes(tmp_path, source, made):
    data("dapo-math-17k", "--source", source, "--output", tmp_path / "again")
    assert (tmp_path / "again" / "dapo-math-17k.parquet").read_bytes() == made[0].read_bytes()


# ---- again ----


def test_a_second_run_does_nothing_and_says_so_until_the_source_changes(tmp_path, source, made):
    words = ("dapo-math-17k", "--source", source, "--output", tmp_path / "data")
    before = [path.stat().st_mtime_ns for path in made]
    assert f"{made[0]}: unchanged (6 rows)" in data(*words).output
    assert [path.stat().st_mtime_ns for path in made] == before
    write_parquet(source, dapo_rows(7, copies=2))
    assert f"{made[0]}: 7 rows, 7 prompts" in data(*words).output
    assert parquet.read_metadata(made[0]).num_rows == 7 and names(tmp_path / "data") == [
        "dapo-math-17k.json",
        "dapo-math-17k.parquet",
    ]


def test_other_options_make_it_again_and_so_does_force(tmp_path, source, made):
    words = ("dapo-math-17k", "--source", source, "--output", tmp_path / "data")
    assert "18 rows, 6 prompts" in data(*words, "--keep-duplicates").output
    assert "unchanged (18 rows)" in data(*words, "--keep-duplicates").output
    before = made[0].stat().st_mtime_ns
    assert "18 rows, 6 prompts" in data(*words, "--keep-duplicates", "--force").output
    assert made[0].stat().st_mtime_ns > before


@pytest.mark.parametrize("change", ["other", "no record", "a record that is none"])
def test_a_file_that_is_not_as_prepared_is_not_overwritten(tmp_path, source, made, change):
    if change == "other":
        made[0].write_bytes(b"years of work")
    elif change == "no record":
        made[1].unlink()
    else:
        made[1].write_text('{"source": 1}')
    content = made[0].read_bytes()
    words = ("dapo-math-17k", "--source", source, "--output", tmp_path / "data")
    with pytest.raises(DataError, match="--force, to replace it"):
        data(*words)
    assert made[0].read_bytes() == content
    data(*words, "--force")
    assert data("--check", made[0]).exit_code == 0


def test_the_source_is_never_the_output(tmp_path):
    source = write_parquet(tmp_path / "data" / "dapo-math-17k.parquet", dapo_rows())
    with pytest.raises(ConfigError, match="is the source and the output"):
        data("dapo-math-17k", "--source", source, "--output", tmp_path / "data", "--force")
    assert parquet.read_metadata(source).num_rows == 18


def test_an_output_that_is_a_file_is_one_error(tmp_path, source):
    with pytest.raises(ConfigError, match="published.parquet is a file"):
        data("dapo-math-17k", "--source", source, "--output", source)


def test_neither_a_data_set_nor_a_file_to_check_is_one_error_and_so_is_both(made):
    for words in ((), ("gsm8k", "--check", made[0])):
        with pytest.raises(ConfigError, match="dapo-math-17k, aime-2024, gsm8k"):
            data(*words)


# ---- check ----


def test_check_accepts_what_was_prepared(tmp_path, made):
    gsm8k_folder(tmp_path / "gsm8k")
    data("gsm8k", "--source", tmp_path / "gsm8k", "--output", tmp_path / "data")
    paths = [made[0], tmp_path / "data" / "gsm8k-train.parquet", tmp_path / "data" / "gsm8k-test.parquet"]
    result = data(*(word for path in paths for word in ("--check", path)))
    assert result.exit_code == 0 and [line.split(":")[0] for line in result.output.splitlines()] == list(
        map(str, paths)
    )


def test_check_finds_one_changed_byte_and_goes_on_to_the_next_file(tmp_path, made):
    other = tmp_path / "other"
    data("aime-2024", "--source", write_parquet(tmp_path / "a.parquet", aime_rows()), "--output", other)
    content = bytearray(made[0].read_bytes())
    content[len(content) // 2] ^= 1
    made[0].write_bytes(content)
    result = data("--check", made[0], "--check", other / "aime-2024.parquet")
    assert result.exit_code == 1 and f"{other}/aime-2024.parquet: as prepared: 12 rows, 3 prompts" in result.output
    assert "is not the file that was prepared" in result.output


def _with_checksum(made, table):
    """The file with other rows, and a record that agrees: only its rows can betray it."""
    parquet.write_table(table, made[0])
    record = json.loads(made[1].read_text())
    record["output"]["sha256"] = subprocess.run(["sha256sum", made[0]], capture_output=True, text=True).stdout.split()[
        0
    ]
    made[1].write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("prompt", [], "prompt is []"),
        ("reward_model", {"style": "rule", "ground_truth": "007"}, "reward_model.ground_truth is '007'; expected '7'"),
        ("extra_info", {"split": "test", "index": 2, "source_id": "a"}, "extra_info.split is 'test'; expected train"),
        (
            "extra_info",
            {"split": "train", "index": 1, "source_id": "a"},
            "extra_info.index is 1; expected the number of this",
        ),
        (
            "extra_info",
            {"split": "train", "index": 5, "source_id": "a"},
            "extra_info.index is 5; expected the number of this",
        ),
    ],
)
def test_check_reads_the_rows_too(made, column, value, said):
    table = parquet.read_table(made[0])
    rows = table.to_pylist()
    rows[2][column] = value
    _with_checksum(made, type(table).from_pylist(rows, table.schema))
    result = data("--check", made[0])
    assert result.exit_code == 1 and f"row 2 (counted from 0): {said}" in result.output


def test_check_compares_the_columns_types_and_the_number_of_rows(made):
    table = parquet.read_table(made[0])
    _with_checksum(made, table.set_column(2, "ability", table["ability"].cast("large_string")))
    assert "column ability is large_string; expected string" in data("--check", made[0]).output
    _with_checksum(made, table.slice(0, 5))
    assert "has 5 rows and 5 prompts" in data("--check", made[0]).output


@pytest.mark.parametrize("gone", [0, 1])
def test_check_misses_a_file_or_its_record(made, gone):
    made[gone].unlink()
    result = data("--check", made[0])
    assert result.exit_code == 1 and (
        "is not there" in result.output if gone == 0 else "has no record" in result.output
    )


# ---- interruption, and a full disk ----


@pytest.fixture(scope="module")
def long_source(tmp_path_factory):
    """So many rows that writing them takes a second."""
    rows = [math_row(f"Problem {number}", str(number), f"id-{number}") for number in range(30_000)]
    return write_parquet(tmp_path_factory.mktemp("long") / "long.parquet", rows, group=10_000)


def _interrupted(long_source, folder, signum):
    """Start to prepare, and end it as soon as the temporary file is there."""
    words = command("dapo-math-17k", "--source", long_source, "--output", folder)
    process = subprocess.Popen(
        words, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 300
    while (
        not (folder.is_dir() and list(folder.glob(".*.part")))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=400)
    return process.returncode, said


def test_a_killed_run_leaves_no_file_under_the_final_name_and_the_next_one_succeeds(tmp_path, long_source):
    folder = tmp_path / "data"
    code, said = _interrupted(long_source, folder, signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    [left] = folder.iterdir()
    assert left.name.startswith(".dapo-math-17k.parquet.") and left.name.endswith(".part")
    old = time.time() - ABANDONED_AFTER - 1
    os.utime(left, (old, old))
    assert data("dapo-math-17k", "--source", long_source, "--output", folder).exit_code == 0
    assert names(folder) == ["dapo-math-17k.json", "dapo-math-17k.parquet"]  # what was left is cleared away
    assert data("--check", folder / "dapo-math-17k.parquet").exit_code == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(tmp_path, long_source, signum):
    code, said = _interrupted(long_source, tmp_path / "data", signum)
    assert code == 128 + signum and "no file is half-written" in said and "Traceback" not in said
    assert names(tmp_path / "data") == []


def test_a_stop_between_the_record_and_the_file_is_made_good_by_the_next_run(tmp_path, source, made):
    old = made[0].read_bytes()
    words = ("dapo-math-17k", "--source", source, "--output", tmp_path / "data", "--keep-duplicates")
    data(*words)
    made[0].write_bytes(old)  # the record of the new file beside the old one
    assert data("--check", made[0]).exit_code == 1
    assert "18 rows" in data(*words).output and data("--check", made[0]).exit_code == 0
    made[0].unlink()
    assert "18 rows" in data(*words).output and data("--check", made[0]).exit_code == 0


def test_without_its_record_no_file_gets_its_name(tmp_path, source):
    (tmp_path / "data" / "dapo-math-17k.json").mkdir(parents=True)
    with pytest.raises(DataError, match="dapo-math-17k.json could not be written"):
        data("dapo-math-17k", "--source", source, "--output", tmp_path / "data")
    assert names(tmp_path / "data") == ["dapo-math-17k.json"]


def test_a_disk_that_takes_no_more_is_one_error_and_the_old_file_stays(tmp_path, long_source, made):
    before = made[0].read_bytes()
    done = subprocess.run(
        command("dapo-math-17k", "--source", long_source, "--output", tmp_path / "data"),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 1 and done.stderr.startswith("DataError: ") and "Traceback" not in done.stderr
    assert f"{made[0]} could not be written: File too large" in done.stderr and "--output" in done.stderr
    assert made[0].read_bytes() == before and names(tmp_path / "data") == [
        "dapo-math-17k.json",
        "dapo-math-17k.parquet",
    ]


# ---- display ----


def test_without_a_terminal_a_long_reading_speaks_now_and_then():
    out = io.StringIO()
    with Bar(Console(file=out, width=200)) as bar:
        for done in (8192, 16384, 20000):
            bar("checking d.parquet", done, 20000)
            bar._spoke -= (PLAIN_INTERVAL + 1) * (done == 8192)  # as if the second batch took so long
    assert out.getvalue() == "checking d.parquet: 16,384 of 20,000 rows\n"


def test_a_terminal_gets_a_bar_with_the_rows_and_it_is_gone_at_the_end():
    out = io.StringIO()
    with Bar(Console(file=out, width=120, force_terminal=True)) as bar:
        bar("checking d.parquet", 8192, 20000)
        bar("writing", 100, 300)
        bar("writing", 200, 300)
    assert "200/300" in out.getvalue() and out.getvalue().endswith("\x1b[2K")  # the last line is erased
