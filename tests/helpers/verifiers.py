"""Tasksets of the package verifiers, for tests. It finds them by module name, so they are written where Python
looks."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

TASKSETS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)
"""
SINGLE = (
    TASKSETS
    + """
class Config(vf.TasksetConfig):
    size: int = 4

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.size):
            yield Sum(Data(prompt=f"{i}+{i}=", system_prompt="add", answer=str(2 * i)), self.config.task)

__all__ = ["Sums"]
"""
)
MULTI = (
    TASKSETS
    + '''
class Patient(Sum):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and trace.last_reply == "pass"

class Sums(vf.Taskset[Patient, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        i = 0
        while True:
            yield Patient(Data(prompt=f"{i}+{i}=", answer=str(2 * i)), self.config.task)
            i += 1

class CoachConfig(vf.EnvConfig):
    pupil: vf.AgentConfig = vf.AgentConfig()

class Coach(vf.Env[CoachConfig]):
    """Asks again until the answer is right, three times at most."""
    async def run(self, task, agents):
        async with agents.pupil.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == task.data.answer:
                    break
                if segment.last_reply == "burn":
                    raise RuntimeError("the coach burnt out")
                segment = await interaction.turn("try again")

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("effort", 0.5)

__all__ = ["Sums", "Coach"]
'''
)
TWO_AGENTS = (
    SINGLE.replace('__all__ = ["Sums"]', "")
    + """
class PairConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()

class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        pass

__all__ = ["Sums", "Pair"]
"""
)


@contextlib.contextmanager
def tasksets_in(folder: Path) -> Iterator[None]:
    """Make `vf_single_sums`, `vf_coached_sums` and `vf_pair_sums` importable in the block."""
    for name, text in {"vf_single_sums": SINGLE, "vf_coached_sums": MULTI, "vf_pair_sums": TWO_AGENTS}.items():
        (folder / f"{name}.py").write_text(text)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
