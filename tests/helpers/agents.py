"""Agents as a user would write them, each with a particular fault or virtue."""

import asyncio
import itertools
import random
import sys
import threading
import time
from pathlib import Path

import openai

from examples.agent import chat_agent, messages_agent, responses_agent
from examples.agent.chat_agent import CALL, alike
from r3async.envs import Message, StepResult


def _ask(base_url, api_key, text="hi"):
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def counts(base_url, api_key, task_seed, worth=1.0):
    """Ask once, and return the reward: `worth` times the length of the answer."""
    assert threading.current_thread() is not threading.main_thread()
    return worth * len(_ask(base_url, api_key, str(task_seed)).choices[0].message.content)


async def counts_async(base_url, api_key, task_seed):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        asked = [
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(i)}]) for i in range(3)
        ]
        answers = await asyncio.gather(*asked)
        return float(sum(len(a.choices[0].message.content) for a in answers))


def rewards_by_call(base_url, api_key, task_seed):
    _ask(base_url, api_key)
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.post("/r3async/reward", body={"reward": 0.25, "done": True}, cast_to=object)


def forgets(base_url, api_key, task_seed):
    _ask(base_url, api_key)


def says_nan(base_url, api_key, task_seed):
    _ask(base_url, api_key)
    return float("nan")


def crashes(base_url, api_key, task_seed):
    _ask(base_url, api_key)
    raise RuntimeError("the agent's own fault")


def leaves(base_url, api_key, task_seed):
    sys.exit("enough")


def never_ends(base_url, api_key, task_seed):
    """Ask until it is refused, which it does not expect."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        while True:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            client.post("/r3async/reward", body={"reward": 1, "id": answer.id}, cast_to=object)


def sleeps(base_url, api_key, task_seed):
    _ask(base_url, api_key)
    time.sleep(60)


def asks_too_much(base_url, api_key, task_seed, wrong):
    """Take an argument that no caller passes."""


CLIENTS = {"chat": chat_agent.play, "responses": responses_agent.play, "messages": messages_agent.play}
_turns = itertools.cycle(CLIENTS)


def each_client(base_url, api_key, task_seed, log):
    """Play the examples in turn, each with the official client of its protocol. `log`: file that gets a line for each
    episode."""
    name = next(_turns)
    reward = CLIENTS[name](base_url, api_key, task_seed)
    with Path(log).open("a") as file:
        file.write(f"{name} {reward}\n")
    return reward


class CalculatorFormat:
    """The game of examples/agent/chat_agent.py as an environment with an oracle, to warm up a new model for it."""

    async def reset(self, task_seed):
        rng = random.Random(task_seed)
        self.a, self.b, self.turn = rng.randint(1, 9), rng.randint(1, 9), 0
        return [Message("user", f"{self.a}+{self.b}")]

    def oracle(self):
        return [CALL.format(a=self.a, b=self.b), str(self.a + self.b)][self.turn]

    async def step(self, action):
        reward = alike(action.text, self.oracle()) / 2
        self.turn += 1
        return StepResult(reward, [] if self.turn == 2 else [Message("tool", str(self.a + self.b))], self.turn == 2)
