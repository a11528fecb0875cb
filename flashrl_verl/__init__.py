# SPDX-License-Identifier: Apache-2.0
"""FlashRL for verl: 8-bit rollouts on vLLM, re-quantized at every update, corrected in the actor's loss.

Importing this package imports nothing else: verl and vLLM load it in every one of their processes.
"""

__version__ = "0.1.0"
