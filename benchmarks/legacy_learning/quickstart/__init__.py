# SPDX-License-Identifier: Apache-2.0
"""A toy task, a toy model, and the run that trains it."""
