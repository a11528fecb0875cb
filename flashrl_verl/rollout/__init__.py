# SPDX-License-Identifier: Apache-2.0
"""The rollout backend ``flashrl``: verl's vLLM server and replica, who may reach them, and what a live engine is."""
