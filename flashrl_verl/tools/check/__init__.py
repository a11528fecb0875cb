# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`: looks at a node, or at every node of a Ray cluster, before a run does.

A file a subject: `versions`, `metadata`, `memory`, `network` and `ray_access` look at this process and its machine;
`verl_process` and `vllm_process` (with `gpu`, `numerics`, `experts` and `attention`) run in fresh
interpreters, as verl's and vLLM's processes will;
`node` puts them together, `cluster` asks every node. Each says what it found as `findings`, with the remedy.
"""
