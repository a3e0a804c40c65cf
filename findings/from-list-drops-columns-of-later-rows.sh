#!/usr/bin/env bash
# datasets 5.2.0 and pyarrow 26.0.1: a column that the first row lacks is dropped from all rows.
#
# Guess: rows without a column get null, as when the same rows are read from JSON lines.
# Behaviour: `Dataset.from_list` and `pyarrow.Table.from_pylist` take the first row's keys for all. Where only some rows
# have `tools` or `answer`, the order of the rows decides whether the column exists. Read from a file, it does.
# Seen on Python 3.11: ['prompt'] from both; ['prompt', 'tools'] from the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import json
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": os.getcwd()}
import datasets
import pyarrow

rows = [{"prompt": "a"}, {"prompt": "b", "tools": "search"}]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
seen = {
    "Dataset.from_list": datasets.Dataset.from_list(rows).column_names,
    "Table.from_pylist": pyarrow.Table.from_pylist(rows).column_names,
    "load_dataset": datasets.load_dataset("json", data_files="rows.jsonl", split="train").column_names,
}
print(seen)
assert seen["Dataset.from_list"] == seen["Table.from_pylist"] == ["prompt"]
assert seen["load_dataset"] == ["prompt", "tools"]
PYTHON
