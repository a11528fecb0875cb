# SPDX-License-Identifier: Apache-2.0
"""The rollout backend ``flashrl``: verl's vLLM server, replica and adapter with a refit that is accounted for.

One weight's way: ``adapter.py`` (trainer: cast, checksum, send) -> ``transfer.py`` (buckets, time-outs) -> ``worker.py``
(engine: receive) -> ``refit.py`` (load, account) -> ``../quantization/parameter.py`` (codes).
"""
