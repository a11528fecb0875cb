# SPDX-License-Identifier: Apache-2.0
"""Truncated importance sampling on the actor's shard."""
