# SPDX-License-Identifier: Apache-2.0
"""What the learning benchmark adds to the quickstart's toy: a longer task, and outlier channels in the model."""
