# SPDX-License-Identifier: Apache-2.0
"""A weight's way into the engine: sender -> transfer -> load -> receipt -> self-check."""
