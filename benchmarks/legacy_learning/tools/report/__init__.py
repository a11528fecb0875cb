# SPDX-License-Identifier: Apache-2.0
"""Reports from metrics files: `run.py` and `curves.py` of one run, `comparison.py` of any number of runs.

A metric's way into a comparison: ``metrics.py`` (file to values by step) -> ``arms.py`` (runs with a name and a style)
-> ``panels.py`` and ``summary.py`` (what is shown) -> ``pictures.py`` (drawn) and ``captions.py`` (said) -> ``page.py``
and ``markdown.py`` (written).
"""

from benchmarks.legacy_learning.tools.report.metrics import HELD_OUT, MISMATCH_KL, MISSING, SCORE, Metrics, read_metrics, show
from benchmarks.legacy_learning.tools.report.run import (
    CURVES_FILE,
    METRICS_FILE,
    REPORT_FILE,
    RUN_FILE,
    Report,
    correction_words,
    held_precision,
    load,
    write,
)

__all__ = [
    "CURVES_FILE",
    "HELD_OUT",
    "METRICS_FILE",
    "MISMATCH_KL",
    "MISSING",
    "REPORT_FILE",
    "RUN_FILE",
    "SCORE",
    "Metrics",
    "Report",
    "correction_words",
    "held_precision",
    "load",
    "read_metrics",
    "show",
    "write",
]
