"""`python -m r3async` is the command `r3async`."""

from r3async.tools.program import run_program

run_program()
