# SPDX-License-Identifier: Apache-2.0
"""What verl and vLLM load by entry point."""
