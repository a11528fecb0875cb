# SPDX-License-Identifier: Apache-2.0
"""Hydra groups of FlashRL, reachable as pkg://flashrl_verl.configs (Hydra asks for this file in a pkg:// directory)."""
