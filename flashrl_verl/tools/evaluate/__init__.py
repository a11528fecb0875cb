# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's accuracy by precision: verl's own validation, with mean@n, pass@k and 95 % intervals."""
