"""The game of `chat_agent.py` by Anthropic's Messages API: calls and results are blocks of messages.

All that it needs is the `anthropic` package, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. To train on it:

    [env]
    name = "agent-command"
    args = { command = ["python", "messages_agent.py"] }

or, without a process for each episode, `name = "agent:messages_agent.py:play"`.
"""

from __future__ import annotations

import json
import os
import random

from anthropic import Anthropic, BadRequestError

ADD = {
    "name": "add",
    "description": "The sum of two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def play(base_url: str, api_key: str, task_seed: int) -> float:
    """One episode: at most 1, half of it for the call and half for the answer."""
    rng = random.Random(task_seed)
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    # This client adds the `/v1` itself.
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages: list = [{"role": "user", "content": f"{a}+{b}"}]
    first = client.messages.create(model="policy", max_tokens=128, messages=messages, tools=[ADD])
    calls = [block for block in first.content if block.type == "tool_use"]
    if not calls:
        return 0.0
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": added(c.input)} for c in calls
    ]
    reward = 0.5 if results[0]["content"] == str(a + b) else 0.25
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    try:
        second = client.messages.create(
            model="policy", max_tokens=16, messages=messages, tools=[ADD]
        )
    except BadRequestError:  # the call was so long that no tokens are left for an answer
        return 0.25
    text = "".join(block.text for block in second.content if block.type == "text")
    return reward + 0.5 * (text.strip() == str(a + b))


def added(arguments: dict) -> str:
    """What the tool says."""
    try:
        return str(sum(int(value) for value in arguments.values()))
    except (TypeError, ValueError):
        return "error"


if __name__ == "__main__":
    seed = int(os.environ["R3ASYNC_TASK_SEED"])
    reward = play(os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"], seed)
    print(json.dumps({"reward": reward}))
