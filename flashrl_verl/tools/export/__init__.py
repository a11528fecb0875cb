# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a Hugging Face folder: BF16, or the rollout's own 8-bit codes for plain vLLM."""
