"""The game of `chat_agent.py` by OpenAI's Responses API: items instead of messages, and the conversation is kept for it.

All that it needs is the `openai` package, OPENAI_BASE_URL and OPENAI_API_KEY. To train on it:

    [env]
    name = "agent-command"
    args = { command = ["python", "responses_agent.py"] }

or, without a process for each episode, `name = "agent:responses_agent.py:play"`.
"""

from __future__ import annotations

import json
import os
import random

from openai import BadRequestError, OpenAI

ADD = {
    "type": "function",
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "strict": False,
}


def play(base_url: str, api_key: str, task_seed: int) -> float:
    """One episode: at most 1, half of it for the call and half for the answer."""
    rng = random.Random(task_seed)
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    client = OpenAI(base_url=base_url, api_key=api_key)
    first = client.responses.create(model="policy", input=f"{a}+{b}", tools=[ADD])
    calls = [item for item in first.output if item.type == "function_call"]
    if not calls:
        return 0.0
    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": added(c.arguments)}
        for c in calls
    ]
    reward = 0.5 if results[0]["output"] == str(a + b) else 0.25
    try:
        second = client.responses.create(
            model="policy",
            input=results,
            previous_response_id=first.id,
            tools=[ADD],
            max_output_tokens=16,
        )
    except BadRequestError:  # the call was so long that no tokens are left for an answer
        return 0.25
    return reward + 0.5 * (second.output_text.strip() == str(a + b))


def added(arguments: str) -> str:
    """What the tool says."""
    try:
        return str(sum(int(value) for value in json.loads(arguments).values()))
    except (TypeError, ValueError):
        return "error"


if __name__ == "__main__":
    seed = int(os.environ["R3ASYNC_TASK_SEED"])
    reward = play(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], seed)
    print(json.dumps({"reward": reward}))
