"""The shell line of a job, which finds a Python that has what the command needs, and
becomes that command.

A job's shell has the PATH with which the head was started, which is a user's own: typing
`.venv/bin/ray start` does not activate the environment. So the line tries, in this order, the
interpreter that the cluster's Ray runs on (the raylet, an ancestor of every job, has it on its
command line), that of the submitter, and those on PATH.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

NOT_FOUND_EXIT_CODE = 127
"""Exit code if no interpreter is suitable, as in a shell for an unknown command."""

_SET_ARGUMENTS = "set -- "
_FIND_PYTHON = """
ray= pid=$PPID
while [ -z "$ray" ] && [ "${pid:-0}" -gt 1 ] && [ -r /proc/$pid/cmdline ]; do
  ray=$(tr "\\0" "\\n" < /proc/$pid/cmdline | sed -n "s/^--python_worker_command=\\"\\{0,1\\}\\([^ \\"]*\\).*/\\1/p")
  pid=$(sed -n "s/^PPid:[^0-9]*//p" /proc/$pid/status)
done
tried=
for python in "$ray" SUBMITTER "$(command -v python3)" "$(command -v python)"; do
  [ -n "$python" ] || continue
  if ! [ -x "$python" ]; then why="there is no such file"
  elif why=$("$python" -c NEEDS 2>&1); then exec "$python" "$@"
  else why=$(printf "%s\\n" "$why" | tail -n 1); fi
  tried="$tried
  $python: $why"
done
echo "no Python on $(uname -n) can run this job (PATH=$PATH):$tried" >&2
echo REMEDY >&2
exit 127
"""
NO_PYTHON_REMEDY = (
    "the Python that Ray was started with on the head (its .venv/bin/ray) needs r3async "
    "installed, or submit from a checkout of r3async, whose code travels, to a cluster that has "
    "its dependencies"
)


def make_entrypoint(
    words: Sequence[str], *, needs: str = "pass", submitter: str = sys.executable
) -> str:
    """Return a line for `sh` that runs `python WORDS` with the first suitable interpreter.

    An interpreter is suitable if it runs the statement `needs` without an error. If there is none,
    the line lists the interpreters it tried and ends with exit code `NOT_FOUND_EXIT_CODE`. After
    `exec` the job is the Python process itself, so signals and exit codes are the command's own.

    Args:
        submitter: The path of the interpreter here, which may not exist in the cluster.
    """
    find = _FIND_PYTHON.replace("SUBMITTER", shlex.quote(submitter)).replace(
        "NEEDS", shlex.quote(needs)
    )
    return (
        _SET_ARGUMENTS
        + shlex.join(words)
        + find.replace("REMEDY", shlex.quote(NO_PYTHON_REMEDY)).rstrip("\n")
    )


def extract_command(line: str) -> str:
    """Return the command in a line of `make_entrypoint`, as typed after `python`; any
    other line unchanged."""
    head, newline, _ = line.partition("\nray= pid=")
    return head.removeprefix(_SET_ARGUMENTS) if newline else line
