# SPDX-License-Identifier: Apache-2.0
"""What a stopped evaluation leaves: whole responses of the same settings are gone on behind, all else begins anew."""

import json

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.evaluate.engine import Answer
from flashrl_verl.tools.evaluate.kept import (
    ANSWER,
    BEGUN,
    GENERATED,
    begin,
    begun,
    finished,
    read_responses,
    write_answer,
)
from flashrl_verl.tools.evaluate.partial import PARTIAL, Response, kept_in, read

FIRST, SECOND = Response(token_ids=[3, 4], truncated=False), Response(token_ids=[], truncated=True)
CUT_OFF = b"[2,[7,8"
ANSWERED = Answer(responses=[[[3]]], truncated=[[False]], layers={}, kernels={}, seconds={})
SETTINGS = {"samples": 2, "seed": 0}


@pytest.fixture
def folder(tmp_path):
    """Of a precision in an evaluation's output, begun with ``SETTINGS``, without a response yet."""
    begin(tmp_path / "int8", SETTINGS)
    return tmp_path / "int8"


def is_begun(folder, settings=SETTINGS, force=False) -> bool:
    return begun(folder.parent, Precision.INT8, settings, force)


def keep_one(folder) -> None:
    with kept_in(folder / PARTIAL) as keep:
        keep(0, FIRST)


# ---- the file ----


def test_what_is_kept_is_read_by_the_number_of_its_request(tmp_path):
    with kept_in(tmp_path / PARTIAL) as keep:
        keep(5, FIRST)
        assert read(tmp_path / PARTIAL) == {5: FIRST}  # at once: nothing may come after
        keep(0, SECOND)
    assert read(tmp_path / PARTIAL) == {5: FIRST, 0: SECOND}


def test_no_file_holds_no_response(tmp_path):
    assert read(tmp_path / PARTIAL) == {}


@pytest.mark.parametrize("before", [{}, {5: FIRST}])
def test_a_line_that_was_cut_off_is_left_out_and_what_is_appended_is_whole(tmp_path, before):
    file = tmp_path / PARTIAL
    with kept_in(file) as keep:
        for number, response in before.items():
            keep(number, response)
    whole = file.read_bytes()
    file.write_bytes(whole + CUT_OFF)
    assert read(file) == before
    assert file.read_bytes() == whole + CUT_OFF  # a reader changes nothing
    with kept_in(file) as keep:
        assert file.read_bytes() == whole
        keep(2, SECOND)
    assert read(file) == before | {2: SECOND}
    assert file.read_bytes().startswith(whole) and file.read_bytes().endswith(b"\n")


# ---- whether it is gone on behind ----


def test_responses_of_the_same_settings_are_gone_on_behind(folder):
    keep_one(folder)
    assert is_begun(folder)
    assert not is_begun(folder, force=True)


def test_a_precision_that_nobody_began_begins(tmp_path):
    assert not is_begun(tmp_path / "int8")


@pytest.mark.parametrize("left", [None, b"", CUT_OFF])
def test_a_folder_without_a_whole_response_begins_anew_with_any_settings(folder, left):
    if left is not None:
        (folder / PARTIAL).write_bytes(left)
    other = SETTINGS | {"seed": 1}
    assert not is_begun(folder) and not is_begun(folder, other)
    begin(folder, other)
    assert json.loads((folder / BEGUN).read_text()) == other
    assert [path.name for path in folder.iterdir()] == [BEGUN]


def test_responses_of_other_settings_are_refused_until_they_are_forced_away(folder):
    keep_one(folder)
    other = SETTINGS | {"seed": 1}
    with pytest.raises(
        ConfigError, match=r"generated otherwise: --seed 0 \(now 1\)\. Choose another --output, or --force"
    ):
        is_begun(folder, other)
    assert read_responses(folder) == {0: FIRST}
    assert not is_begun(folder, other, force=True)
    begin(folder, other)
    assert read_responses(folder) == {}
    keep_one(folder)
    assert is_begun(folder, other)


@pytest.mark.parametrize("name", [PARTIAL, BEGUN])
@pytest.mark.parametrize("content", [b"{\n", b"1\n", b"[1,[2]]\n", b"[1,2,false]\n", b"\xff\n"])
def test_a_damaged_file_is_one_error_that_names_force(folder, name, content):
    keep_one(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"int8/{name} cannot be used .*with --force") as refused:
        is_begun(folder)
    assert "\n" not in str(refused.value)
    assert not is_begun(folder, force=True)


def test_a_folder_that_is_no_evaluations_is_not_replaced(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match=f"it has no {BEGUN}.*not replaced"):
        begin(tmp_path, SETTINGS)
    assert (tmp_path / "mine").exists()


def test_a_finished_precision_has_its_answer_and_nothing_half_done(folder):
    keep_one(folder)
    write_answer(folder, ANSWERED, SETTINGS)
    assert {path.name for path in folder.iterdir()} == {ANSWER, GENERATED}
    assert finished(folder.parent, Precision.INT8, SETTINGS, force=False) and not is_begun(folder)
