# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a Hugging Face folder: in BF16, or with the rollout's own 8-bit codes for serving.

Routers of MoE models stay in the trainer's precision, as in the rollout (``../../refit/wire.py``).
"""
