# SPDX-License-Identifier: Apache-2.0
"""The console of the commands: a file or a pipe gets whole table rows, of one width whatever the command."""

import subprocess
import sys


def test_what_goes_into_a_pipe_is_not_broken_at_80_columns():
    program = "from flashrl_verl.tools.console import new_console; new_console().print('word ' * 31, highlight=False)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.rstrip() for line in done.stdout.splitlines()] == [("word " * 31).rstrip()]
