# SPDX-License-Identifier: Apache-2.0
"""`flashrl report`: runs compared from their metrics files. `metrics.py` reads one file, `runs.py` names the runs and
makes the table, `page.py` draws the curves and writes the page."""

from flashrl_verl.tools.report.metrics import HELD_OUT, MISMATCH_KL, MISSING, SCORE, read_metrics
from flashrl_verl.tools.report.page import write
from flashrl_verl.tools.report.runs import Report, load

__all__ = ["HELD_OUT", "MISMATCH_KL", "MISSING", "SCORE", "Report", "load", "read_metrics", "write"]
