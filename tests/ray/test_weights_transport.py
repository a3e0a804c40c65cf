"""Weights through Ray's object store: from one process to another, in buckets, verified where they arrive."""

from __future__ import annotations

import pytest
import torch

from r3async.actors.delivery import ObjectStoreReceiver, ObjectStoreSender
from r3async.weights.publish import EncodedWeights, WeightError
from r3async.weights.reading import read_verified, verify
from tests.unit.test_weights import tensors

pytestmark = pytest.mark.usefixtures("local_ray")
BUCKET = 64


class Learner:
    def __init__(self):
        self.sender = ObjectStoreSender(BUCKET)

    def send(self, version):
        return self.sender.send(version, tensors(), torch.bfloat16)


class Generator:
    def __init__(self, directory):
        self.receiver = ObjectStoreReceiver(directory)

    def fetch(self, publication, timeout=30.0):
        manifest = self.receiver.fetch(publication.manifest, publication.parts, timeout)
        verify(manifest)
        return manifest, dict(read_verified(manifest))

    def damaged(self, publication):
        parts = [*publication.parts[:-1], b"\0" * len(self._last(publication))]
        import ray

        parts[-1] = ray.put(parts[-1])
        manifest = self.receiver.fetch(publication.manifest, parts, 30.0)
        try:
            verify(manifest)
        except WeightError as error:
            return str(error)

    @staticmethod
    def _last(publication):
        import ray

        return ray.get(publication.parts[-1])

    def files(self):
        return sorted(p.name for p in self.receiver._folder.path.glob("version-*"))


def test_what_one_worker_sends_another_one_reads(tmp_path):
    import ray

    learner, generator = ray.remote(Learner).remote(), ray.remote(Generator).remote(tmp_path)
    try:
        for version in (0, 1):
            publication = ray.get(learner.send.remote(version), timeout=60)
            assert len(publication.parts) > 3
            assert publication.manifest.path == ""
            manifest, read = ray.get(generator.fetch.remote(publication), timeout=60)
            assert manifest.version == version
            assert manifest.digest == publication.manifest.digest
            for name, tensor in tensors().items():
                assert torch.equal(read[name], tensor.to(read[name].dtype)), name
        assert ray.get(generator.files.remote(), timeout=60) == ["version-1.safetensors"]
        again = ray.get(learner.send.remote(2), timeout=60)
        assert "tensor 'tied' is corrupt" in ray.get(generator.damaged.remote(again), timeout=60)
    finally:
        ray.kill(learner)
        ray.kill(generator)


@pytest.mark.parametrize("bucket", [1, 7, 64, 10**6])
def test_no_part_is_larger_than_a_bucket_and_all_of_them_are_the_file(bucket):
    encoded = EncodedWeights(3, tensors(), torch.float32, bucket)
    header, *parts = [bytes(part) for part in encoded]
    assert all(len(part) <= max(bucket, 8) for part in parts)  # one element at least
    manifest = encoded.manifest("")
    whole = EncodedWeights(3, tensors(), torch.float32, 10**9)
    assert b"".join([header, *parts]) == b"".join(bytes(part) for part in whole)
    assert manifest == whole.manifest("")
