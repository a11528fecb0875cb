# SPDX-License-Identifier: Apache-2.0
"""The guard of a run: after every step it compares the mismatch's metrics with limits, and warns or stops.

A metric beyond its limit for ``flashrl.guard.patience`` consecutive steps is an event. An event is told once; again only when
the metric recovered in between, or when it has gone on for ``_REMIND_AFTER`` times as long. The counts are kept beside verl's
checkpoint, so that a run that is resumed more often than ``patience`` steps does not start from zero each time.

It is plain Python on the driver: metrics in, an event out. ``guard_watches.py`` says what is watched, ``trainer.py`` when.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.correction_settings import CorrectionSettings
from flashrl_verl.errors import FlashRLError, GuardError
from flashrl_verl.guard_settings import NODE, Action, GuardConfig
from flashrl_verl.guard_watches import Moment, Watch, produced, watches
from flashrl_verl.rules import CORRECTION, get
from flashrl_verl.whole_file import write_whole

log = logging.getLogger("verl.flashrl")

STATE_FILE = "flashrl_guard.json"
"""In verl's folder of a checkpoint, ``global_step_N``."""

_REMIND_AFTER = 10
"""In units of the patience: an event that goes on is told again after this long, not every step."""


class Guard:
    """Counts, for every watched metric, the consecutive steps it was beyond its limit.

    Args:
        settings: the node ``flashrl.guard``.
        watched: the metrics, in the order in which they are told; one whose limit says nothing is left out with a warning.
        sure: names of those that every step produces; a missing one counts as beyond its limit.
        first_step: the first step at which the actor is updated; before it nothing is watched.
        save_freq: steps between checkpoints; below 1 there are none.
    """

    def __init__(
        self, settings: GuardConfig, watched: tuple[Watch, ...], sure: frozenset[str], first_step: int = 0, save_freq: int = -1
    ):
        self.settings = settings
        self.first_step = first_step
        self._save_freq = save_freq
        self._watches = [w for w in watched if settings.enable and self._has_limit(w)]
        self._sure = sure
        self._steps = {w.name: 0 for w in self._watches if w.name in sure}
        self._told: set[str] = set()  # those whose present episode was an event
        self._events = 0
        self._saving: Path | None = None  # the checkpoint of the step that is not yet refitted
        self._last_saved: Path | None = None  # the last one that is whole

    @classmethod
    def from_config(cls, cfg: DictConfig, settings: FlashRLConfig) -> "Guard":
        """The guard of the run that ``cfg``, verl's composed configuration, describes; ``settings`` is its ``flashrl`` node."""
        # Until then verl updates the critic only: codes do not change and nothing is corrected.
        first_step = get(cfg, "trainer.critic_warmup", 0)
        correction = CorrectionSettings.from_config(get(cfg, CORRECTION, {}))
        watched = watches(settings.precision, correction, updates_a_step(cfg))
        sure = produced(cfg, settings, correction)
        guard = cls(settings.guard, watched, sure, first_step, get(cfg, "trainer.save_freq", -1))
        guard.tell(settings.precision is not Precision.BF16, bool(correction.rejections))
        return guard

    def tell(self, quantized: bool, rejects: bool) -> None:
        """Log what is watched, once; that nothing is, as a warning.

        Args:
            quantized: whether there are codes that may change.
            rejects: whether tokens are rejected.
        """
        if not self.settings.enable:
            return
        without = {"code_change_rate": quantized, "rejected_share": rejects}
        names = [watch.name for watch in self._watches if without.get(watch.name, True)]
        if names:
            log.info("the guard watches %s (%s.*; patience %d)", ", ".join(names), NODE, self.settings.patience)
        else:
            log.warning("the guard has nothing to watch in this configuration: %s.action and its limits do nothing", NODE)

    def look(self, moment: Moment, step: int, metrics: Mapping[str, Any]) -> None:
        """Count what is beyond its limit, and act on what has been for too long.

        Args:
            moment: which metrics of the step are known by now.
            step: the trainer's global step.
            metrics: verl's and ours.

        Raises:
            GuardError: an event under ``flashrl.guard.action=stop``.
        """
        if not self.settings.enable:
            return
        refitted = self._saving if moment is Moment.REFITTED else None
        if refitted is not None:
            self._last_saved = refitted  # verl's own save has ended, or the run would have
        if step >= self.first_step:
            self._judge(moment, step, metrics)
        if refitted is not None:
            self.save(refitted)  # verl saves before the refit: its part of the counts is added
            self._saving = None

    def _judge(self, moment: Moment, step: int, metrics: Mapping[str, Any]) -> None:
        over = [
            watch
            for watch in self._watches
            if watch.moment is moment and self._is_there(watch, metrics) and self._count(watch, step, metrics)
        ]
        new = [watch for watch in over if watch.name not in self._told]
        self._events += len(new)
        self._told |= {watch.name for watch in new}
        if self.settings.action is Action.STOP:
            # All of them: a run resumed in the middle of an episode stops, although the event was told before.
            self._stop(moment, step, metrics, over)
        else:
            self._warn(step, metrics, [watch for watch in over if watch in new or self._is_reminder(watch)])

    def _has_limit(self, watch: Watch) -> bool:
        limit = self._limit(watch)
        if limit is None or watch.ordinary is None or watch.beyond(limit, watch.ordinary):
            return limit is not None
        log.warning(
            "the guard does not watch %s: of ratios of an ordinary shape up to %.0f %% exceed this cap, so that %s would tell "
            "nothing. Raise %s.rollout_is_threshold or this limit, or set it to null",
            *(watch.metric, 100 * watch.ordinary, self._setting(watch), CORRECTION),
        )
        return False

    def _is_there(self, watch: Watch, metrics: Mapping[str, Any]) -> bool:
        return watch.metric in metrics or watch.name in self._sure

    def _count(self, watch: Watch, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take one step's value into account; returns whether it has been beyond the limit for the patience or longer."""
        if not _is_beyond(metrics.get(watch.metric), watch, self._limit(watch)):
            if watch.name in self._told:
                self._told.remove(watch.name)
                log.info(
                    "step %d: the guard: %s is within %s again, after %d steps",
                    *(step, self._words(watch, metrics), self._setting(watch), self._steps[watch.name]),
                )
            self._steps[watch.name] = 0
            return False
        self._steps[watch.name] = self._steps.get(watch.name, 0) + 1
        return self._steps[watch.name] >= self.settings.patience

    def _is_reminder(self, watch: Watch) -> bool:
        lasting = self._steps[watch.name] - self.settings.patience
        return lasting % (_REMIND_AFTER * self.settings.patience) == 0

    def _stop(self, moment: Moment, step: int, metrics: Mapping[str, Any], over: list[Watch]) -> None:
        if over:
            text, way_back = self._describe(over, metrics), self._way_back(moment)
            raise GuardError(
                f"step {step}: the guard stops the run: {text}. {way_back}, or go on regardless with {NODE}.action=warn"
            )

    def _way_back(self, moment: Moment) -> str:
        if self._last_saved is None:
            every = self._save_freq
            return f"No checkpoint was saved so far (trainer.save_freq={every}{': none ever is' if every < 1 else ''})"
        if moment is Moment.TRAINED:
            return f"No checkpoint was saved from this step: resume from {self._last_saved}"
        return f"Resume from {self._last_saved}"

    def _warn(self, step: int, metrics: Mapping[str, Any], over: list[Watch]) -> None:
        if over:
            text = self._describe(over, metrics)
            log.warning("step %d: the guard: %s. The run goes on; %s.action=stop would end it", step, text, NODE)

    def _describe(self, over: list[Watch], metrics: Mapping[str, Any]) -> str:
        """What is beyond its limit and what it means; then what to try, once where two of them have the same remedy."""
        facts = []
        for watch in over:
            count = self._steps[watch.name]
            steps = "1 step" if count == 1 else f"{count} steps in a row"
            facts.append(f"{self._words(watch, metrics)} is beyond {self._setting(watch)} for {steps}: {watch.meaning}")
        remedies = dict.fromkeys(watch.remedy for watch in over)
        return f"{'; '.join(facts)}. Try {'; or '.join(remedies)}; or another limit (null: off)"

    def _words(self, watch: Watch, metrics: Mapping[str, Any]) -> str:
        value = metrics.get(watch.metric)
        if value is None:
            return f"{watch.metric}, which is missing although this configuration produces it,"
        return f"{watch.metric}={float(value):.4g}"

    def _limit(self, watch: Watch) -> float | None:
        return getattr(self.settings, watch.limit)

    def _setting(self, watch: Watch) -> str:
        return f"{NODE}.{watch.limit}={self._limit(watch):g}"

    def metrics(self) -> dict[str, int]:
        """``flashrl/guard_events``, all so far, and ``flashrl/guard_<name>_steps``, consecutive steps beyond the limit."""
        if not self.settings.enable:
            return {}
        steps = {f"flashrl/guard_{name}_steps": count for name, count in self._steps.items()}
        return {"flashrl/guard_events": self._events, **steps}

    # ---- beside verl's checkpoint ----

    def save(self, folder: Path) -> None:
        """Write the counts into a checkpoint's folder, which is made; a reader finds the old file or the new one, whole."""
        if not self.settings.enable:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state = {"steps": self._steps, "told": sorted(self._told), "events": self._events}
        write_whole(folder / STATE_FILE, json.dumps(state).encode())
        self._saving = folder

    def load(self, folder: Path) -> None:
        """Go on from the counts in a checkpoint's folder; a checkpoint without them is an older one, and counting starts anew.

        Raises:
            FlashRLError: the file is damaged.
        """
        path = folder / STATE_FILE
        self._last_saved = folder
        if not self.settings.enable or not path.exists():
            return
        try:
            state = json.loads(path.read_text())
            steps = {str(name): int(count) for name, count in state["steps"].items()}
            told, events = set(state["told"]), int(state["events"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FlashRLError(
                f"{path} is damaged ({type(error).__name__}: {error}). Remove it: the guard then counts from zero again"
            ) from None
        watched = {watch.name for watch in self._watches}
        self._steps |= {name: count for name, count in steps.items() if name in watched}
        self._told = told & self._steps.keys()
        self._events = events


def _is_beyond(value: Any, watch: Watch, limit: float) -> bool:
    return value is None or not math.isfinite(value) or watch.beyond(float(value), limit)


def updates_a_step(cfg: DictConfig) -> int:
    """How often verl updates the actor in a step."""
    batch, mini = get(cfg, "data.train_batch_size"), get(cfg, "actor_rollout_ref.actor.ppo_mini_batch_size")
    return get(cfg, "actor_rollout_ref.actor.ppo_epochs", 1) * -(-batch // mini)
