"""A repository with a failing test, which the policy has to mend by commands: an environment of its own, with a sandbox.

    [env]
    name = "repair.py:MendRepository"

Each answer with tool calls is answered by what the commands said. The first answer without one ends the episode, and the tests
are run, as they came with the task: they are restored first. The reward is 1 if all of them pass.
"""

from __future__ import annotations

import json
import random
import shlex

from r3async import Action, Message, StepResult
from r3async.envs.sandbox import RUN_TOOL, CommandLimits, Sandbox
from r3async.envs.tool_call_parser import run_tool_calls

BUGS = {
    "total": ("return sum(prices)", "return sum(prices[1:])"),
    "mean": ("return total(prices) / len(prices)", "return total(prices) / (len(prices) - 1)"),
    "cheapest": ("return min(prices)", "return max(prices)"),
    "discounted": (
        "return [p * (100 - percent) / 100 for p in prices]",
        "return [p - percent for p in prices]",
    ),
}
"""By the function: its line as it should be, and as it is in a task."""

SHOP = '''"""Prices in a shop."""


def total(prices):
    {total}


def mean(prices):
    {mean}


def cheapest(prices):
    {cheapest}


def discounted(prices, percent):
    {discounted}
'''

TESTS = """import unittest

import shop


class ShopTest(unittest.TestCase):
    def test_total(self):
        self.assertEqual(shop.total([2, 3, 7]), 12)

    def test_mean(self):
        self.assertAlmostEqual(shop.mean([2, 3, 7]) * 3, shop.total([2, 3, 7]))

    def test_cheapest(self):
        self.assertEqual(shop.cheapest([4, 2, 9]), 2)

    def test_discounted(self):
        self.assertEqual(shop.discounted([100, 50], 10), [90, 45])


if __name__ == "__main__":
    unittest.main()
"""

PROMPT = "`python3 test_shop.py` fails in this directory. Mend shop.py, then say that you are done."


class MendRepository:
    """One function of four is wrong. At most `commands` tool calls an episode, of `seconds` each."""

    tools = (RUN_TOOL,)

    def __init__(self, commands: int = 8, seconds: float = 20.0, image: str = ""):
        self.limits, self.image, self.commands = CommandLimits(seconds=seconds), image, commands
        self.sandbox: Sandbox | None = None
        self.bug, self.used = "", 0

    async def reset(self, task_seed: int) -> list[Message]:
        await self.close()
        self.sandbox = await Sandbox.open(self.limits, self.image)
        self.bug, self.used = random.Random(task_seed).choice(sorted(BUGS)), 0
        lines = {
            name: wrong if name == self.bug else right for name, (right, wrong) in BUGS.items()
        }
        await self.sandbox.write({"shop.py": SHOP.format(**lines), "test_shop.py": TESTS})
        return [Message("user", PROMPT)]

    async def step(self, action: Action) -> StepResult:
        left = self.commands - self.used
        tools = self.tools if left > 0 else ()
        results = await run_tool_calls(
            action.text,
            tools,
            self._run,
            seconds=self.limits.seconds + 10,
            max_calls=left,
            thinking=action.thinking,
        )
        self.used += len(results)
        if results:
            return StepResult(0.0, results)
        return StepResult(await self._reward(), done=True, metrics={"commands": self.used})

    async def _run(self, name: str, arguments: dict) -> str:
        if name != "run" or not isinstance(arguments.get("command"), str):
            raise ValueError("the only tool is run, with a command")
        return (await self.sandbox.run(arguments["command"])).format_for_policy()

    async def _reward(self) -> float:
        await self.sandbox.write({"test_shop.py": TESTS})
        return float((await self.sandbox.run("python3 test_shop.py")).exit_code == 0)

    def oracle(self) -> str:
        """Looks at the tests, mends the line, and says so."""
        if self.used == 0:
            return _call("python3 test_shop.py")
        if self.used == 1:
            right, wrong = BUGS[self.bug]
            code = f"s = open('shop.py').read(); open('shop.py', 'w').write(s.replace({wrong!r}, {right!r}))"
            return _call(f"python3 -c {shlex.quote(code)}")
        return "Done."

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()
            self.sandbox = None


def _call(command: str) -> str:
    return (
        f"<tool_call>{json.dumps({'name': 'run', 'arguments': {'command': command}})}</tool_call>"
    )
