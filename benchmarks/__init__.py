# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, run from a checkout: ``python -m benchmarks.NAME --help``. They are not installed."""
