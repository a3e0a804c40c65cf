#!/usr/bin/env bash
# datasets 5.2.0: a folder with train_sft and train_prefs is one split, and testmini is read into none.
#
# Guess: files whose names are not exactly a split's are a split each, or the folder is refused.
# Behaviour: `load_dataset(folder)` puts each file that has `train` as a word into the split `train`, so preference rows
# and demonstrations are mixed. Beside files that name a split, a file that names none (testmini) is left out without a
# word.
# Seen on Python 3.11: {'train': ['train_prefs', 'train_sft'], 'test': ['test']}.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import json
import os
import pathlib

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": os.getcwd()}
import datasets

pathlib.Path("rows").mkdir()
for name in ("train_sft", "train_prefs", "test", "testmini"):
    pathlib.Path("rows", f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
seen = {name: sorted(split["prompt"]) for name, split in datasets.load_dataset("rows").items()}
print(seen)
assert seen == {"train": ["train_prefs", "train_sft"], "test": ["test"]}
PYTHON
