# SPDX-License-Identifier: Apache-2.0
"""`flashrl report`: runs compared from their metrics files. `metrics.py` reads one file, `runs.py` names the runs and
makes the table, `page.py` draws the curves and writes `report.md` and `report.html`."""

from flashrl_verl.tools.report.metrics import HELD_OUT, MISMATCH_KL, MISSING, SCORE, Metrics, read_metrics, show
from flashrl_verl.tools.report.page import CURVES_FILE, PAGE_FILE, REPORT_FILE, write
from flashrl_verl.tools.report.runs import METRICS_FILE, RUN_FILE, Report, Run, load

__all__ = [
    "CURVES_FILE",
    "HELD_OUT",
    "METRICS_FILE",
    "MISMATCH_KL",
    "MISSING",
    "PAGE_FILE",
    "REPORT_FILE",
    "RUN_FILE",
    "SCORE",
    "Metrics",
    "Report",
    "Run",
    "load",
    "read_metrics",
    "show",
    "write",
]
