# SPDX-License-Identifier: Apache-2.0
"""What cannot be read is blamed for not being read, and what cannot be written for not being written."""

import pytest
from published_data import dapo_rows, write_lines, write_parquet

from flashrl_verl.errors import DataError
from flashrl_verl.tools.data import rows
from flashrl_verl.tools.data.source import open_rows, sha256
from flashrl_verl.tools.data.verl_file import temporary_beside


@pytest.mark.parametrize("write, name", [(write_lines, "published.jsonl"), (write_parquet, "published.parquet")])
def test_a_source_that_goes_while_the_output_is_written_is_what_cannot_be_read(tmp_path, write, name):
    source = write(tmp_path / name, dapo_rows(6, copies=1))
    opened = open_rows(source, rows.VERL_COLUMNS)
    source.unlink()
    with pytest.raises(DataError, match=rf"^\S*{name} cannot be read"), temporary_beside(tmp_path / "made.parquet"):
        list(opened.batches())


def test_a_checksum_of_what_cannot_be_read_is_an_error_with_its_name(tmp_path):
    with pytest.raises(DataError, match=rf"^{tmp_path} cannot be read: .*Is a directory"):
        sha256(tmp_path)


def test_an_output_below_a_file_is_one_error_and_not_that_of_cleaning_up(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/made\.parquet could not be written"):
        with temporary_beside(tmp_path / "file" / "made.parquet"):
            raise AssertionError("there is no such folder")
