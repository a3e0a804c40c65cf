#!/usr/bin/env bash
# torch 2.13.0, gloo: an all-reduce of half-precision tensors rounds equal elements differently, by their place.
#
# Guess: ranks are added in one order, or in float32, so equal elements have equal sums.
# Behaviour: the sum is rounded to the tensor's dtype after each addition, and each part of the tensor is added in
# another order of the ranks. In bfloat16 the sum of 256, 1, 1, 1 over four ranks is 260 in the first two elements of four
# and 256 in the last two. Gradients that are reduced in half precision depend on where they lie in their bucket.
# Seen on Python 3.11, CPU: bfloat16 [260, 260, 256, 256], float16 (2048, 1, 1, 1) [2052, 2052, 2048, 2048].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import os
import sys

SCRIPT = """
import sys, torch, torch.distributed as ranks
rank = int(sys.argv[1])
ranks.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=4)
for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
    values = torch.full((4,), large if rank == 0 else 1.0, dtype=dtype)
    ranks.all_reduce(values)
    if rank == 0:
        print(*(int(value) for value in values), flush=True)
ranks.barrier()
"""
import subprocess

meeting = os.path.abspath("meeting")
processes = [
    subprocess.Popen([sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), meeting], stdout=subprocess.PIPE, text=True)
    for rank in range(4)
]
printed = [process.communicate(timeout=120)[0] for process in processes]
seen = [[int(value) for value in line.split()] for line in printed[0].splitlines() if line[:1].isdigit()]
print(seen)
assert seen == [[260, 260, 256, 256], [2052, 2052, 2048, 2048]], seen
PYTHON
