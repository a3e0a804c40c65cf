"""A learner with a rank on each of two hosts that share nothing, with real weights: engines get the version that one host
would have published, and nobody has the whole of it in memory.

The hosts are Linux namespaces of this machine (`helpers/hosts_apart.py`), the line between them takes 5 ms each way: ranks that
train answer each other some ninety times a step.
"""

import json
import shutil
import sys

import pytest
from transformers import Qwen3MoeConfig

from tests.helpers import models as hm
from tests.helpers.hosts_apart import start_ray, two_hosts, why_not
from tests.helpers.ranks_on_hosts import BUCKET_BYTES, VERSIONS

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


def test_each_host_publishes_its_part_and_engines_have_the_digest_of_the_whole(tmp_path):
    if reason := why_not():
        pytest.skip(f"no hosts can be made here: {reason}")
    config = Qwen3MoeConfig(
        vocab_size=hm.VOCAB,
        hidden_size=512,
        num_hidden_layers=4,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    model, log = hm.save_random(tmp_path / "model", config), tmp_path / "log"
    with two_hosts(delay_seconds=0.005) as (home, remote, _):
        for host in (home, remote):
            shutil.copytree(model, host.path("/tmp/model"))
        start_ray(home, ["--head", "--port=6379", "--include-dashboard=false"], tmp_path / "home")
        start_ray(remote, [f"--address={home.address}:6379"], tmp_path / "remote")
        command = [sys.executable, "-m", "tests.helpers.ranks_on_hosts", "/tmp/model", "/tmp/run"]
        process = home.start(command, log, RAY_ADDRESS=f"{home.address}:6379")
        assert process.wait(500) == 0, log.read_text()[-5000:]
    (line_found,) = [text for text in log.read_text().splitlines() if text.startswith("FOUND ")]
    found = json.loads(line_found.removeprefix("FOUND "))
    print(line_found)

    assert found["hosts"] == ["home", "remote"]
    assert len(found["versions"]) == VERSIONS
    assert found["versions"][0]["digest"] == found["one_host"]
    for number, version in enumerate(found["versions"]):
        assert {engine["digest"] for engine in version["engines"]} == {version["digest"]}
        whole, deltas = (sum(part[i] for part in version["parts"]) for i in range(2))
        for engine in version["engines"]:
            assert engine["received"] == (deltas if number else whole)
            assert engine["memory"] < 2 * BUCKET_BYTES
        for share, memory in version["ranks"]:
            assert share < 0.6 * 2 * whole  # what is copied is in float32
            # The copy and its part of the file, which is in bfloat16; no second one of either.
            assert memory < 1.5 * share + 3 * BUCKET_BYTES
    assert found["steps_without_sender"] >= 1
    assert len(set(found["after"])) == 1
    stalled, went_on = [e for e in found["events"] if e["event"].startswith("weights_")][:2]
    assert (stalled["event"], went_on["event"], went_on["host"]) == ("weights_stalled", "weights_go_on", "remote")
    assert went_on["replaced"]
    assert found["left"] == []
