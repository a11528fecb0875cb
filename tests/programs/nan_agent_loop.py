# SPDX-License-Identifier: Apache-2.0
"""An agent loop that rewards its own responses, and one in five with what is no number."""

import itertools
import math

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class RewardsItself(SingleTurnAgentLoop):
    calls = itertools.count(1)

    async def run(self, *args, **kwargs):
        output = await super().run(*args, **kwargs)
        output.reward_score = math.nan if next(self.calls) % 5 == 0 else 1.0
        return output
