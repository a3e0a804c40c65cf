"""Versions that have adapters alone: what is written, what engines are given first, and what is refused."""

import contextlib

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from r3async.actors.rank_actor import LocalRank
from r3async.actors.version_publisher import VersionPublisher
from r3async.config import ConfigError, LoraConfig, config_from_dict
from r3async.data.versions import Lineage
from r3async.learner import LearnerError
from r3async.record.timeline import Timeline
from r3async.rollout.engine import InstallReport
from r3async.rollout.vllm.engine import AdapterSettings
from r3async.weights.delta import VersionDigest
from r3async.weights.host_cache import HostVersionCache
from r3async.weights.host_weights import copy_to_host
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import BASE_VERSION, WeightManifest
from r3async.weights.version_reader import verify_version_file
from r3async.world.real import REAL_WORLD
from tests.helpers import lora as hl
from tests.helpers import models as hm
from tests.helpers.fleet import Generator, deliver, loaded, published, restart
from tests.helpers.parity import batch
from tests.helpers.parity import config as parity_config

LIMIT = 20.0


@pytest.mark.parametrize("backend", ["megatron", "torch"])
async def test_a_version_is_the_adapters_and_the_start_model_stays_published_beside_them(tmp_path, backend):
    config = hl.alone(hl.with_lora(parity_config(), "self_attn"))
    config.learner.backend = backend
    config.weights.directory = str(tmp_path / "weights")
    model = hm.make_hf_model(tmp_path / "model")
    with contextlib.closing(LocalRank.load(config, model)) as rank:
        rank.set_weight_transport("shared_memory")
        hl.randomize(rank.backend)
        lanes = [REAL_WORLD.threads.new_worker(name) for name in ("torch", "writer")]
        timeline = Timeline(tmp_path, "learner", enabled=False)
        writer = VersionPublisher(REAL_WORLD, config, Lineage(3), timeline, rank, *lanes, None, LIMIT)
        base = (await writer.publish_base()).manifest
        start = load_file(model / "model.safetensors")
        assert (base.version, base.adapter, base.lineage) == (BASE_VERSION, None, 3)
        assert all(torch.equal(t, start[n]) for n, t in load_file(base.path).items())
        before: dict[str, torch.Tensor] = {}
        for version in range(3):
            await writer.copy_weights(version, with_probe_scores=False)
            await lanes[0].run(rank.run_minibatches, [[batch()]], version=version)
            manifest = (await writer.write_version([BASE_VERSION])).publication.manifest
            verify_version_file(manifest)
            assert manifest.adapter is not None
            assert (manifest.adapter.rank, manifest.adapter.base_digest) == (hl.RANK, base.digest)
            assert manifest.nbytes < base.nbytes / 10
            now = load_file(manifest.path)
            assert all(".lora_" in name for name in now)
            assert before.keys() in (set(), now.keys())
            assert not any(torch.equal(tensor, before[name]) for name, tensor in now.items() if before)
            before = now
        verify_version_file(base)
        with pytest.raises(LearnerError, match="adapters alone"):
            await writer.save_model_directory(manifest, model, tmp_path / "failed")
        for lane in lanes:
            await lane.close()


def adapters(version: int):
    """Return version 0 with the offer of a base of 10^12 bytes, and later ones without."""
    base = TransferOffer(WeightManifest(BASE_VERSION, "", {}, 10**12))
    return msgspec.structs.replace(published(version), base=None if version else base)


async def test_an_engine_is_given_the_base_once_and_again_after_a_restart():
    handles = {"generator-0": Generator(), "generator-1": Generator()}
    installer = await loaded(handles, adapters(0))
    first, second = installer.fleet
    limits = []

    def note_limit(*args):
        limits.append(first.answer_seconds)
        return InstallReport(handles["generator-0"].version, 0.2, 0.1)

    handles["generator-0"].wrong["install_version"] = note_limit
    await installer.install_first_version()
    await deliver(installer, 1)
    assert min(limits[:2]) > 1000  # the base's bytes count
    assert limits[2] < 1000
    assert [handle.asked("install_version") for handle in handles.values()] == [
        [("install_version", version) for version in (BASE_VERSION, 0, 1)]
    ] * 2
    assert installer.versions_in_use == [BASE_VERSION]
    await restart(installer, second)
    assert handles["generator-1"].asked("install_version")[3:] == [
        ("install_version", version) for version in (BASE_VERSION, 1)
    ]


def test_a_host_keeps_the_base_for_engines_that_restart(tmp_path):
    caches = [HostVersionCache(tmp_path, "run") for _ in range(2)]
    using, fetching = caches
    versions = [VersionDigest(number, 7) for number in (BASE_VERSION, 0, 1)]
    for version in versions:
        using.version_path(version).write_bytes(b"weights")
        assert using.acquire_version(version) is not None
    fetching.remove_unused_versions(None)
    assert [using.version_path(version).is_file() for version in versions] == [True, False, True]
    using.close()
    fetching.remove_unused_versions(None)
    assert not any(fetching.version_path(version).is_file() for version in versions)
    fetching.close()


def test_a_rank_that_hands_in_no_adapters_has_an_empty_copy():
    memory = copy_to_host({}, None)
    assert memory.describe_tensors(torch.float32) == []
    assert copy_to_host({}, memory) is memory


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"backend": "nccl"}}, r"`weights\.backend` = \"nccl\".*= \"auto\""),
        ({"generator": {"on_update": "recompute"}}, r"`generator\.on_update` = \"recompute\".*\"keep\""),
        ({"generator": {"engine": "scripted"}, "weights": {"probe": False}}, r"\"scripted\" has no model.*\"merged\""),
    ],
)
def test_what_engines_cannot_do_with_adapters_alone_is_refused_with_the_fix(settings, message):
    lora = {"lora": {"rank": 8, "deliver": "adapter"}}
    with pytest.raises(ConfigError, match=message):
        config_from_dict({"learner": lora} | settings)


def test_a_rank_that_engines_do_not_serve_is_refused():
    with pytest.raises(ConfigError, match=r"`rank` = 513 is more than the 512"):
        config_from_dict({"learner": {"lora": {"rank": 513, "deliver": "adapter"}}})
    assert AdapterSettings(33, ["mlp.up_proj"], 2).build_engine_args()["max_lora_rank"] == 64


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["all-linear"], "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (["layers.3"], "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (["self_attn"], "q_proj k_proj v_proj o_proj"),
        (["layers.1.mlp", "o_proj"], "o_proj gate_proj up_proj down_proj"),
    ],
)
def test_an_engine_has_slots_for_what_targets_may_name(targets, modules):
    served = LoraConfig(rank=4, targets=targets).list_served_modules()
    assert AdapterSettings(4, served, 2).build_engine_args()["lora_target_modules"] == modules.split()
