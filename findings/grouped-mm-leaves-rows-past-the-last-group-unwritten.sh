#!/usr/bin/env bash
# torch 2.13.0, CPU: grouped_mm does not write the rows behind its last group.
#
# Guess: rows that belong to no group are zeros.
# Behaviour: where the last offset is below the number of rows (padding behind the routed tokens), these rows of the result
# are memory as it was found: whatever lay there, NaN too. A sum or a gradient over all rows then depends on chance.
# Seen on Python 3.11 with memory filled by NaN before use: five rows of 16, then three of NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
rows = torch.ones(8, 16, dtype=torch.bfloat16)
experts = torch.ones(2, 16, 16, dtype=torch.bfloat16)
result = torch.nn.functional.grouped_mm(rows, experts, offs=torch.tensor([2, 5], dtype=torch.int32))[:, 0]
print(result.tolist())
assert result[:5].tolist() == [16.0] * 5
assert result[5:].isnan().all()
PYTHON
