# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan`: what a rollout in each precision needs and gains, from a model's configuration and a GPU's data
sheet.

Nothing is loaded and no GPU is needed. ``gpus`` and ``shape`` say what is given, ``memory`` how many tokens fit,
``step`` how long one decode step takes, ``schedule`` how long all responses take together; ``planner`` compares the
choices, ``advice`` says what to take, and ``table`` shows it.
"""
