# SPDX-License-Identifier: Apache-2.0
"""Rewards for end-to-end tests with untrained models: varying within a group, never varying, and late."""

import time


def share_of_digits(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    """The share of digits among 16 characters: differs between random responses."""
    share = sum(c.isdigit() for c in solution_str) / 16
    return {"score": share, "acc": share + len(solution_str) / 1000}


def constant(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    return {"score": 0.0, "acc": 0.0}


def slow(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    """So that a step is generation, and little else."""
    time.sleep(10.0)
    return share_of_digits(data_source, solution_str, ground_truth)
