# SPDX-License-Identifier: Apache-2.0
"""verl and vLLM as they are: the ledger of patches to them, the versions that were run."""
