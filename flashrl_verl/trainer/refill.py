# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling that starts the groups it expects to need, and no more.

DAPO replaces groups whose samples are all right or all wrong ([DAPO] section 3.2). verl starts two prompts for each
such group, waits for all in flight and throws the surplus away: with 40 % of constant groups about a quarter of what it
generates. This buffer starts prompts until enough informative groups are to be expected, and draws the batch from all
that it got, whenever they finished: a batch of the first to finish would be one of short responses.

How many running groups will be informative is taken from the step before, all of whose groups were waited for. Long
groups finish last, and may be informative more or less often than short ones: so the rate of groups that still run is
that of the groups which finished as late in the step before. The first step has no other rate than its own, and uses it
when half a batch has finished.
"""

import math
import random
import time
from collections.abc import Sequence

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, _accumulate_eviction_metrics
from verl.utils.skip import SkipManager

STARTED = "training/filter_groups/started_samples"
THROWN_AWAY = "training/filter_groups/discarded_surplus_samples"
"""Groups of a step, in verl's words samples: all that were started; informative ones that the batch had no room for."""

_MARGIN = 1.0
"""Standard deviations by which the expected number of informative groups has to exceed the batch."""
_SMALLEST_RATE = 0.05
"""A step whose groups were all constant must not ask for infinitely many."""
_FEWEST = 32
"""Groups that a rate is taken from at least: the last few to finish would be no rate."""


class LastStep:
    """How many groups were informative in a step, and so will be in the next.

    Args:
        outcomes: of each group in the order in which they finished, whether it was informative. If there are none, what
            is certainly missing is started: one prompt for each constant group.
    """

    def __init__(self, outcomes: Sequence[bool] = ()):
        self._outcomes = list(outcomes)
        self.rate = max(_SMALLEST_RATE, sum(self._outcomes) / len(self._outcomes)) if self._outcomes else 1.0
        """Share of informative groups."""

    def rate_among_running(self, finished: int, running: int) -> float:
        """The share of informative groups among those that are last to finish.

        Args:
            finished: groups of this step that have.
            running: groups that have not.
        """
        total = len(self._outcomes)
        tail = self._outcomes[min(int(total * finished / (finished + running)), total - _FEWEST) :]
        return sum(tail) / len(tail) if total >= _FEWEST else self.rate

    def prompts_to_start(self, batch: int, informative: int, finished: int, running: int) -> int:
        """Prompts to start now, so that a batch of informative groups is to be expected.

        Args:
            batch: groups of a batch.
            informative: groups that have finished and are informative.
            finished: groups that have finished.
            running: groups that were started and have not finished.
        """
        rate = self.rate_among_running(finished, running) if running else self.rate
        mean, variance = informative + running * rate, running * rate * (1 - rate)
        more = max(0, math.ceil((batch - mean) / self.rate))
        while mean + more * self.rate - _MARGIN * math.sqrt(variance + more * self.rate * (1 - self.rate)) < batch:
            more += 1
        return more


class RefillBuffer(ReplayBuffer):
    """verl's synchronous buffer; see the module. Without a filter of groups, and in validation, it is verl's.

    Args:
        seed: of the draw of a batch from the groups that finished.
        max_prompts: bound on the prompts of a step, may be infinite. One more is asked for when nothing runs and the
            batch is not full, so that `refill_fn` refuses it.
        kwargs: verl's.
    """

    def __init__(self, seed: int, max_prompts: float, **kwargs):
        super().__init__(**kwargs)
        self._seed, self._max_prompts = seed, max_prompts
        self._last_step: LastStep | None = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """A batch of informative groups, and verl's metrics with `STARTED` and `THROWN_AWAY`.

        Args:
            global_steps: the step.
            partition_id: `train` or `val`.
            batch_size: groups.
        """
        if partition_id == "val" or self.filter_groups_metric is None:
            return super().sample(global_steps, partition_id, batch_size)
        return self._sample_informative(global_steps, partition_id, batch_size)

    @SkipManager.annotate_tq(role="rollout_tq", phase="sample")
    def _sample_informative(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        metrics: dict = {}
        outcomes: list[bool] = []
        last_debug_time = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            reasons = self._terminal_eviction_reasons(global_steps, partition_id)
            evicted, stale, _, counted = self._evict_terminal_groups(global_steps, partition_id, reasons)
            if evicted:
                _accumulate_eviction_metrics(metrics, counted, stale)
            informative = self._sampleable_terminal_keys(partition_id, reasons)
            outcomes += [False] * len(evicted) + [True] * (len(informative) - sum(outcomes))
            running = len(self.pending_keys[partition_id]) + len(self.running_keys[partition_id])
            if len(informative) < batch_size:
                if more := self._may_start(batch_size, len(informative), outcomes, running):
                    self.refill_fn(more)
                    continue
            elif not running:
                break
            last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)

        self._last_step = LastStep(outcomes)
        # Not the first to finish, whatever order keys have.
        drawn = random.Random(f"{self._seed} {global_steps}").sample(sorted(informative), batch_size)
        self._clear_groups(partition_id, informative.difference(drawn))
        metrics |= {STARTED: len(outcomes), THROWN_AWAY: len(informative) - batch_size}
        batch = self._materialize_batch(partition_id, drawn, dict(self.partitions[partition_id]))
        return batch, metrics

    def _may_start(self, batch_size: int, informative: int, outcomes: list[bool], running: int) -> int:
        finished = len(outcomes)
        expected = self._last_step or LastStep(outcomes if 2 * finished >= batch_size else ())
        more = expected.prompts_to_start(batch_size, informative, finished, running)
        in_flight = self.max_inflight_gen_batches * self.train_batch_size - running
        left = self._max_prompts - finished - running
        return int(max(0, min(more, in_flight, left))) or int(not running)
