# SPDX-License-Identifier: Apache-2.0
"""A model, a tokenizer and a task that are made on the spot, for machines without a GPU or a network."""
