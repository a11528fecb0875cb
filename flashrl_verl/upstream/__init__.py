# SPDX-License-Identifier: Apache-2.0
"""verl and vLLM as they are: the ledger of patches to them, hooks on their imports, the versions that were run."""
