# SPDX-License-Identifier: Apache-2.0
"""What verl and vLLM load by entry point, the ledger of patches to them, and the versions that were run."""
