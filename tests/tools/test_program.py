"""The program's end: its code, all that it printed, and what was to be done at the exit."""

import subprocess
import sys

import pytest

HEAVY = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
LEFT = "class Left:\n    def __del__(self, say=print): say('taken apart')\nleft = Left()\n"
"""Something that only the interpreter's own end takes apart."""


def said(before: str, *, after: str = "end_process(3)") -> tuple[int, str]:
    code = f"import atexit, sys, threading, time\n{before}\nfrom r3async.tools.program import end_process\n{after}\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert not ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


def test_a_program_that_imported_torch_is_not_taken_apart_and_loses_nothing():
    before = HEAVY + LEFT + "atexit.register(lambda: print('at exit'))\nprint('x' * 100_000)"
    assert said(before) == (3, "x" * 100_000 + "\nat exit\n")


@pytest.mark.parametrize("other", ["", HEAVY + "sys.modules['ray'] = types.ModuleType('ray')\n"])
def test_any_other_program_ends_as_usual(other):
    assert said(other + LEFT) == (3, "taken apart\n")


def test_a_thread_that_must_end_is_waited_for():
    begun = "threading.Thread(target=lambda: (time.sleep(0.3), print('ended'))).start()"
    assert said(HEAVY + begun) == (3, "ended\n")


@pytest.mark.parametrize(("raised", "code"), [("SystemExit(4)", 4), ("SystemExit", 0), ("SystemExit('a word')", 1)])
def test_the_exit_code_is_the_commands(raised, code):
    after = f"import r3async.tools.program as p\ndef main(): raise {raised}\np.main = main\np.run_program()"
    assert said("", after=after) == (code, "")
