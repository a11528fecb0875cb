# SPDX-License-Identifier: Apache-2.0
"""Benchmarks behind ``flashrl bench``: each makes its own models, from shapes alone, and writes a table, JSON and a plot."""
