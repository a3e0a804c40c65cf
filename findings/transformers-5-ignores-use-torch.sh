#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0: `AutoConfig` and `AutoTokenizer` load torch, also with USE_TORCH=0.
#
# Guess: USE_TORCH=0, which kept torch out of a process with transformers 4, still does. So a program that only reads
# a configuration or a tokenizer need not wait for torch.
# Behaviour: transformers 5 does not read the variable. The import of `AutoConfig` loads torch wherever it is installed.
# Seen on Python 3.11:
#   4.57.6: torch is loaded: False
#   5.24.0: torch is loaded: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cd "$folder"
for version in 4.57.6 5.24.0; do
  env/bin/pip install --quiet --disable-pip-version-check "transformers==$version" torch==2.13.0 2> errors.txt ||
    { tail -n 3 errors.txt >&2; exit 1; }
  USE_TORCH=0 env/bin/python -W ignore - 2> errors.txt << 'PROGRAM' || { tail -n 3 errors.txt >&2; exit 1; }
import sys
from transformers import AutoConfig, AutoTokenizer, __version__

assert AutoConfig and AutoTokenizer
print(f"{__version__}: torch is loaded: {'torch' in sys.modules}")
PROGRAM
done | tee seen.txt
grep -q "^4.57.6: torch is loaded: False" seen.txt && grep -q "^5.24.0: torch is loaded: True" seen.txt ||
  { echo "the behaviour has changed" >&2; exit 1; }
