# SPDX-License-Identifier: Apache-2.0
"""The errors a user can meet. Each message gives the value, the reason and the Hydra key (or the step) to change."""


class FlashRLError(RuntimeError):
    """Base class: the run stops, and the message says why and what to do."""


class ConfigError(FlashRLError, ValueError):
    """The configuration contradicts itself, verl, vLLM or the hardware; raised before anything is loaded."""


class DataError(FlashRLError):
    """A data file cannot be had, read or written, or holds what it must not; nothing of it was used or changed."""


class RefitError(FlashRLError):
    """A weight update did not arrive whole in the rollout engine; the engine's weights must not be sampled from."""


class DynamicSamplingError(FlashRLError):
    """Dynamic sampling used up its budget of prompts without filling a training batch."""


class GuardError(FlashRLError):
    """The mismatch of rollout and trainer was beyond a limit for longer than ``flashrl.guard`` allows, or is not known."""


class NodeLostError(FlashRLError):
    """A node that the run needs left the Ray cluster."""
