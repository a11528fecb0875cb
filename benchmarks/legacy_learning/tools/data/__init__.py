# SPDX-License-Identifier: Apache-2.0
"""Published data sets as the parquet files that verl reads: `flashrl data`, `scripts/prepare_data.py`.

`catalog` says what there is, `source` finds and reads it, `rows` checks a row, `survey` reads a whole source before
anything is written, `verl_file` writes and reads back the result, `record` keeps where it is from, `prepare` puts these
together.
"""
