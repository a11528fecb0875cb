# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache of INT8 codes with a scale for each token and head."""
