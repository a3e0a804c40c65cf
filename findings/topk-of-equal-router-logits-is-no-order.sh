#!/usr/bin/env bash
# torch 2.13.0, CPU: of equal router logits topk takes neither the first nor the last, and 3 % of bfloat16 rows have
# such a tie at the border.
#
# Guess: topk of equal values takes the lowest index, as a stable sort does, so two routers that compute the same logits
# choose the same experts.
# Behaviour: of 128 equal values the eight chosen are 81 to 88. Of 4,096 rows of 128 normal logits in bfloat16, topk and a
# stable sort choose another set of eight in 127: rounding makes the eighth and ninth equal. Equal logits do not make
# equal routes; the indices have to be carried over.
# Seen on Python 3.11: [81 .. 88]; 127 of 4096.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch

equal = sorted(torch.topk(torch.zeros(128), 8).indices.tolist())
logits = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
chosen = torch.topk(logits, 8).indices.sort(-1).values
stable = torch.sort(logits, descending=True, stable=True).indices[:, :8].sort(-1).values
other = (chosen != stable).any(-1).sum().item()
print("of equal values:", equal, "- other sets than a stable sort:", other, "of 4096")
assert equal not in (list(range(8)), list(range(120, 128))), equal
assert 100 <= other <= 160, other
PYTHON
