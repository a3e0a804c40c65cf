"""`data = "org/name"`: rows of the Hugging Face hub, from a mirror, from its cache, and from a folder without a network."""

import io
import os
import subprocess
import sys

import pytest

from tests.helpers.hub import serve_dataset

ROWS = {"prompt": ["1+1=", "2+2=", "3+3="], "answer": ["2", "4", "6"]}


def plan(folder, cache, **environment):
    """Run the plan of a run on the rows."""
    command = [sys.executable, "-m", "r3async", "train", "math", "reward=number", "--dry-run"]
    command += [f"data={environment.pop('data', 'org/sums')}", "data.eval=1"]
    known = {"HF_HOME": str(cache), "HF_ENDPOINT": "http://127.0.0.1:9"}
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **known, **environment}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.long
def test_rows_of_the_hub_are_fetched_once_and_without_a_network_come_from_its_cache_or_a_folder(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    parquet.write_table(pyarrow.table(ROWS), packed := io.BytesIO())
    files = {"data/train-00000-of-00001.parquet": packed.getvalue(), "README.md": b"---\nlicense: mit\n---\n"}
    with serve_dataset("org/sums", files) as address:
        fetched = plan(tmp_path, tmp_path / "cache", HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
    assert "2 rows are trained" in fetched.stdout, fetched.stderr
    assert "2 rows are trained" in plan(tmp_path, tmp_path / "cache", HF_HUB_OFFLINE="1").stdout
    # Another machine, that has neither a network nor the cache.
    refused = plan(tmp_path, tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert refused.returncode == 2
    assert "hf download org/sums --repo-type dataset --local-dir sums" in refused.stderr
    for name, content in files.items():  # as `hf download` writes them
        (tmp_path / "sums" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums" / name).write_bytes(content)
    assert "2 rows are trained" in plan(tmp_path, tmp_path / "empty", data="sums/data").stdout
