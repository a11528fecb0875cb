# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan`: what a rollout in each precision needs and gains, from its shape and a GPU's data sheet.

Nothing is loaded and no GPU is needed. In reading order: `gpus` and `shape` are what is given, `memory` says how many
tokens fit, `step` how long a decode step takes, `schedule` how long all responses take, `whole_step` what the trainer
adds, `planner` compares the variants, `table` shows them.
"""
