# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's accuracy by precision, apart from training: mean@k and pass@k with confidence intervals."""
