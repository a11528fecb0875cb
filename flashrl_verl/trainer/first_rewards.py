# SPDX-License-Identifier: Apache-2.0
"""Says when no response of the first batch, or of the first validation, has had a reward.

A model that answers in another form than the reward looks for never gets one: every group is constant, dynamic sampling
replaces all of them, and a run would sample to its bound without a word of why.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from flashrl_verl.trainer.checked_rewards import shown


class FirstRewards:
    """Over one of verl's buffers: looks at what is drawn or replaced, until two responses differ or one has a reward.

    Args:
        first_batch: groups of training after which it is said; of validation it is after the first that are drawn.
        tell: takes `train` or `val`, how many responses there were, and the row of one. Called at most once for each.
            None: nothing is looked at.
        kwargs: the buffer's.
    """

    def __init__(self, first_batch: int = 1, tell: Callable[[str, int, dict[str, Any]], None] | None = None, **kwargs):
        super().__init__(**kwargs)
        self._first_batch, self._tell = first_batch, tell
        self._values: dict[str, set[float]] = {"train": set(), "val": set()} if tell else {}
        """Of the partitions that are looked at."""
        self._responses, self._groups = Counter(), Counter()
        self.told: set[str] = set()
        """Partitions of which it was said."""

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons):
        constant = eviction_reasons[1]
        self._look(partition_id, (key for key in self.partitions[partition_id] if key.split("_")[0] in constant))
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _materialize_batch(self, partition_id: str, selected_prompt_uids, partition_snapshot) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        self._look(partition_id, batch.keys)
        return batch

    def _look(self, partition_id: str, keys: Iterable[str]) -> None:
        if partition_id not in self._values or not (keys := list(keys)):
            return
        fields = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores", "extra_fields"])
        for scores, extra in zip(fields["rm_scores"], fields["extra_fields"], strict=True):
            accuracy = getattr(extra, "data", extra).get("reward_extra_info", {}).get("acc")
            # The accuracy where there is one: the penalty of length varies without any reward.
            self._values[partition_id].add(float(scores.sum() if accuracy is None else accuracy))
        self._responses[partition_id] += len(keys)
        self._groups[partition_id] += len({key.split("_")[0] for key in keys})
        if len(self._values[partition_id]) > 1 or max(self._values[partition_id]) > 0:
            del self._values[partition_id]
        elif partition_id == "val" or self._groups[partition_id] >= self._first_batch:
            del self._values[partition_id]
            self.told.add(partition_id)
            row = tq.kv_batch_get(keys=keys[:1], partition_id=partition_id)
            row = {name: getattr(row[name][0], "data", row[name][0]) for name in row.keys()}
            self._tell(partition_id, self._responses[partition_id], row)


class WatchedBuffer(FirstRewards, ReplayBuffer):
    """verl's synchronous one."""


class WatchedAsyncBuffer(FirstRewards, ReplayBufferAsync):
    """verl's asynchronous one."""


def describe_unrewarded(
    partition_id: str, responses: int, row: dict[str, Any], reward_function: str | None, decode: Callable[[Any], str]
) -> str:
    """What `FirstRewards` tells, in words.

    Args:
        partition_id, responses, row: as `tell` takes them.
        reward_function: the user's own; None for verl's.
        decode: makes text of token ids.
    """
    where = "the first validation" if partition_id == "val" else "the first batch"
    reward = reward_function or f"verl's for data_source={row.get('data_source')!r}"
    one = shown(decode, row["prompts"], row["responses"], row.get("reward_model"))
    return (
        f"none of the {responses} responses of {where} has had a reward ({reward}). Either the policy solves none of "
        "the problems, or it does not answer in the form that the reward looks for. One of them: "
        f"{one}. Where the form is wrong, ask for it in the data's prompts (of GSM8K: flashrl data "
        "gsm8k-boxed), or set reward.custom_reward_function.path"
    )
