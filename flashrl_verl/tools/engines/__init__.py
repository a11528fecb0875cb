# SPDX-License-Identifier: Apache-2.0
"""Shapes of models, and vLLM models without an engine, for tools and benchmarks."""
