# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in processes of their own, for tools and benchmarks."""
