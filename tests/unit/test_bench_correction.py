# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench correction``: the memory it reports is that of the part, and bad options are refused."""

import json
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import correction, correction_report
from benchmarks.__main__ import app
from flashrl_verl.errors import ConfigError, FlashRLError

MIB = 2**20


def test_padding_takes_the_memory_of_the_padded_fields():
    rows, tokens = 256, 4096
    cost = correction.measure("padding", rows, tokens, repeats=2)
    padded = rows * tokens * (8 + 3 * 4)  # an int64 mask and three float32 fields
    assert 0.9 * padded < cost.peak_bytes < 2.5 * padded, (cost.peak_bytes / MIB, padded / MIB)
    assert len(cost.seconds) == 2 and min(cost.seconds) > 0


def test_what_is_synthesized_is_a_healthy_batch_of_the_lengths_asked_for():
    fields = correction._synthetic(2048, 100)
    lengths = fields["response_mask"].offsets().diff()
    assert lengths.max() == 100 and lengths.min() == 1 and 48 < lengths.float().mean() < 53
    log_ratio = fields["old_log_probs"].values() - fields["rollout_log_probs"].values()
    assert torch.allclose(log_ratio.std(), torch.tensor(0.02), rtol=0.1)


def test_more_ranks_than_responses_are_refused():
    with pytest.raises(ConfigError, match="--ranks 9 .* Lower --ranks"):
        correction.run(8, [16], ranks=9)


def test_a_part_for_which_there_is_no_memory_is_told_with_what_to_lower():
    with pytest.raises(
        FlashRLError, match="RuntimeError: .*needs about .* GiB of memory. Lower --responses or --tokens"
    ):
        correction._in_own_process("padding", 4, 10**14, 1)  # more than any address space


def test_what_else_goes_wrong_in_a_part_is_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="random_ expects 'from'") as caught:
        correction._in_own_process("padding", 4, 0, 1)
    assert not isinstance(caught.value, FlashRLError)


@pytest.mark.parametrize("kind", [MemoryError, BrokenProcessPool])
def test_a_process_that_was_ended_and_pythons_own_error_are_a_lack_of_memory(kind):
    assert correction._ran_out_of_memory(kind("x")) and not correction._ran_out_of_memory(RuntimeError("x"))


@pytest.mark.parametrize("words", ["", "2k", "0", "128,-1"])
def test_lengths_that_are_none_are_refused(words):
    result = CliRunner().invoke(app, ["correction", "--tokens", words])
    assert isinstance(result.exception, ConfigError) and "--tokens" in str(result.exception)


def test_a_report_has_every_part_at_every_length(tmp_path):
    costs = [correction.Cost(part, n, 8, [0.1, 0.3, 0.2], MIB) for n in (10, 20) for part in correction.PARTS]
    report = correction.Report(responses=8, ranks=4, versions={}, device="CPU", date="2026-01-01", costs=costs)
    data, picture = correction_report.write(report, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [cost["part"] for cost in json.loads(data.read_text())["costs"]] == [*correction.PARTS] * 2
    table = correction_report.table(report)
    assert table.row_count == len(costs) + 1
    assert list(table.columns[3].cells)[0] == "0.20 (0.10-0.30)"
