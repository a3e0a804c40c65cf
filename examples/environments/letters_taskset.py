"""A taskset of verifiers (its `verifiers.v1` interface): letters are put into alphabetical order.

[env]
name = "verifiers:letters_taskset"
"""

import random

import verifiers.v1 as vf


class LettersData(vf.TaskData):
    answer: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.8)
    async def in_place(self, task, trace) -> float:
        """The share of letters that are where they belong."""
        return sum(a == b for a, b in zip(trace.last_reply, task.answer, strict=False)) / len(
            task.answer
        )

    @vf.reward(weight=0.2)
    async def only_letters(self, task, trace) -> float:
        """The share of the answer that is letters of the task, which even a random model earns now and then."""
        return sum(letter in task.answer for letter in trace.last_reply) / max(
            len(trace.last_reply), 1
        )


class LettersConfig(vf.TasksetConfig):
    letters: int = 4


class Letters(vf.Taskset[LettersTask, LettersConfig]):
    INFINITE = True

    def load(self):
        rng = random.Random(0)
        while True:
            letters = "".join(rng.sample("abcdefgh", self.config.letters))
            data = LettersData(
                prompt=f"In alphabetical order: {letters}", answer="".join(sorted(letters))
            )
            yield LettersTask(data, self.config.task)


__all__ = ["Letters"]
