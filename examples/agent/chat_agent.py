"""An agent that knows nothing of r3async: it asks a model for a sum, adds for it when asked to, and reads its answer.

All that it needs is the `openai` package, OPENAI_BASE_URL and OPENAI_API_KEY. To train on it:

    [env]
    name = "agent-command"
    args = { command = ["python", "chat_agent.py"] }

or, without a process for each episode, `name = "agent:chat_agent.py:play"`.
"""

from __future__ import annotations

import json
import os
import random

from openai import BadRequestError, OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>{{"name":"add","arguments":{{"a":{a},"b":{b}}}}}</tool_call>'
"""The call as a model that has learned the format would write it; what it writes instead is compared with this."""


def play(base_url: str, api_key: str, task_seed: int) -> float:
    """One episode: at most 1, half of it for the call and half for the answer. What is nearly right earns a little."""
    rng = random.Random(task_seed)
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list = [{"role": "user", "content": f"{a}+{b}"}]
    first = (
        client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        .choices[0]
        .message
    )
    if not first.tool_calls:
        return 0.25 * alike(first.content or "", CALL.format(a=a, b=b))
    call = first.tool_calls[0].function
    arguments = json.loads(call.arguments)
    right_call = call.name == "add" and sorted(str(v) for v in arguments.values()) == sorted(
        [str(a), str(b)]
    )
    try:
        result = str(sum(int(value) for value in arguments.values()))
    except (TypeError, ValueError):
        result = "error"
    messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": result}]
    try:
        second = (
            client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            .choices[0]
            .message
        )
    except BadRequestError:  # the call was so long that no tokens are left for an answer
        return 0.25
    return (0.5 if right_call else 0.25) + 0.5 * alike(second.content or "", str(a + b))


def alike(text: str, wanted: str) -> float:
    """Share of positions at which the texts are equal, in `0..1`."""
    return sum(x == y for x, y in zip(text, wanted, strict=False)) / max(len(text), len(wanted), 1)


if __name__ == "__main__":
    seed = int(os.environ["R3ASYNC_TASK_SEED"])
    reward = play(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], seed)
    print(json.dumps({"reward": reward}))
