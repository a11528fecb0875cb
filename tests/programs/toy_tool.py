# SPDX-License-Identifier: Apache-2.0
"""verl's tool loop with a model that knows no tools: a third of the vocabulary ends an answer, which calls the tool."""

import itertools

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def seven() -> str:
    """Seven.

    Returns:
        It.
    """
    return "7"


@ToolParser.register("toy")
class EveryAnswerCalls(ToolParser):
    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(0, len(self.tokenizer), 3))

    async def extract_tool_calls(self, responses_ids, tools=None):
        return "", [FunctionCall(name="seven", arguments="{}")]


@ToolParser.register("failing")
class EveryFifthFails(EveryAnswerCalls):
    calls = itertools.count(1)

    async def extract_tool_calls(self, responses_ids, tools=None):
        if next(self.calls) % 5 == 0:
            raise OSError("a fault inside a response")
        return "", []
