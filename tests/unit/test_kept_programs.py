"""A program ends with everything that it started, whoever ends it and however its processes hid."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from r3async.world.kept_programs import KeptProgram
from tests.helpers.processes import has_ended

HIDES = """
env -i setsid /bin/sh -c 'trap "{trap}" TERM; echo $$ > {mark}~; mv {mark}~ {mark}; while :; do sleep 0.05; done' &
while [ ! -e {mark} ]; do sleep 0.01; done
{then}
"""
"""A shell script that starts a process with an empty environment and a session of its own."""


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("grace", [0.0, 0.3], ids=["at once", "after SIGTERM, which it ignores"])
def test_what_a_program_left_runs_on_until_the_program_is_ended(tmp_path, grace):
    mark = tmp_path / "pid"
    program = KeptProgram(["/bin/sh", "-c", HIDES.format(mark=mark, trap=":", then="exit 3")], grace=grace)
    assert program.wait(120) == 3
    left = int(mark.read_text())
    assert not has_ended(left)
    program.end()
    assert has_ended(left)
    program.end()  # once more does nothing


async def test_a_program_is_ended_with_a_request_first(tmp_path):
    mark, obeyed = tmp_path / "pid", tmp_path / "obeyed"
    script = HIDES.format(mark=mark, trap=f"touch {obeyed}; exit", then="sleep 600")
    program = KeptProgram(["/bin/sh", "-c", script], grace=20.0)
    wait_until(mark.exists)
    begun = time.monotonic()
    await program.end_async()
    assert time.monotonic() < begun + 15, "what has ended is not waited for"
    assert obeyed.exists()
    assert has_ended(int(mark.read_text()))
    assert await program.wait_async() == -signal.SIGTERM


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_program_that_is_waited_for_is_ended_at_once(cancelled):
    program = KeptProgram(["/bin/sh", "-c", "sleep 600"])
    waiting = asyncio.create_task(program.wait_async())
    await asyncio.sleep(0)
    if cancelled:
        waiting.cancel()
    begun = time.monotonic()
    await program.end_async()
    assert time.monotonic() < begun + 10
    (code,) = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 120)
    assert isinstance(code, asyncio.CancelledError) if cancelled else code == -signal.SIGKILL


OWNER = """
import sys, time
from r3async.world.kept_programs import KeptProgram
from tests.helpers.processes import has_ended
program = KeptProgram(["/bin/sh", "-c", sys.argv[1]])
time.sleep(600)
"""


def test_nothing_of_a_program_outlives_an_owner_that_is_killed(tmp_path):
    mark = tmp_path / "pid"
    script = HIDES.format(mark=mark, trap=":", then="exit 0")
    with subprocess.Popen([sys.executable, "-c", OWNER, script]) as owner:
        wait_until(mark.exists)
        owner.kill()
    left = int(mark.read_text())
    wait_until(lambda: has_ended(left))


def test_signals_that_are_blocked_here_reach_the_program():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        program = KeptProgram(["/bin/sh", "-c", "kill -TERM $$; sleep 20"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert program.wait(120) == -signal.SIGTERM
    program.end()


def test_a_signal_to_every_process_of_the_command_ends_no_keeper(tmp_path):
    program = KeptProgram(["/bin/sh", "-c", "trap : TERM; echo $$ > pid; sleep 0.3; exit 4"], cwd=tmp_path)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    os.kill(program.keeper_pid, signal.SIGTERM)
    assert program.wait(120) == 4
    program.end()


def test_a_program_that_is_not_there_has_an_exit_code(tmp_path):
    with (tmp_path / "said").open("wb") as said:
        program = KeptProgram([str(tmp_path / "nothing")], stderr=said)
    assert program.wait(120) == 127
    program.end()
    assert "nothing: No such file or directory" in (tmp_path / "said").read_text()
