#!/usr/bin/env bash
# datasets 5.2.0 with pyarrow 26.0.1: answers in JSON lines that look like dates become timestamps, and integers beyond
# 64 bits become floats.
#
# Guess: a quoted string stays a string; an integer that does not fit is an error or stays exact.
# Behaviour: a column whose strings are all ISO dates is read as timestamp, so a reward that compares text with
# `row["answer"]` gets a datetime. An integer of 2**63 or more turns its column into float64 without a warning: the
# answer loses its last digits. Both files are valid JSON.
# Seen on Python 3.11: timestamp[s], datetime(2024, 1, 1, 0, 0); float64, 9.223372036854776e+18.
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


def read(name, answers):
    with open(name, "w") as file:
        file.writelines(json.dumps({"prompt": "q", "answer": answer}) + "\n" for answer in answers)
    rows = datasets.load_dataset("json", data_files=name, split="train")
    print(name, rows.features["answer"].dtype, rows[0]["answer"])
    return rows.features["answer"].dtype, rows[0]["answer"]


dtype, value = read("dates.jsonl", ["2024-01-01", "2024-03-05"])
assert dtype == "timestamp[s]" and value.year == 2024, (dtype, value)
dtype, value = read("large.jsonl", [2**63 + 1, 3])
assert dtype == "float64" and int(value) != 2**63 + 1, (dtype, value)
PYTHON
