"""`weights.backend = nccl` with sockets: what hangs alone. In the place of NCCL between GPUs: a queue between threads of this
process, of which some are the sending processes."""

import asyncio
import contextlib
import queue
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import StatelessProcessGroup

from r3async.actors.weight_transport import choose_weight_backend
from r3async.config import load_config
from r3async.config.supervise import TimeLimits
from r3async.config.weights import WeightsConfig
from r3async.rollout.vllm import worker as vllm_worker
from r3async.rollout.vllm.nccl_sender import (
    listen_for_workers,
    make_nccl_sender,
    order_tensor_names,
    read_tensors,
    serve_sends,
)
from r3async.rollout.vllm.version_installer import verify_manifest
from r3async.rollout.vllm.worker import WorkerExtension
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.weights.nccl import (
    NcclLinkTable,
    NcclReceiver,
    NcclSender,
    Offer,
    Ready,
    Refused,
    Send,
    Sent,
    Up,
    decode_nccl_message,
    encode_nccl_message,
    find_free_port,
    request_receive_offer,
)
from tests.unit.test_hosts import needs_ipv6


class Process:
    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = False

    def poll(self):
        return self.code

    def kill(self) -> None:
        self.killed = True


class Beside(Process):
    """A sending process, as a thread. `wire` takes the place of the group; what `hang` says is sent by nobody."""

    def __init__(self, endpoint: str, link: str, wire: queue.Queue, hang: set[int]):
        super().__init__()
        self.wire, self.hang, self.groups = wire, hang, set()
        threading.Thread(target=self._run, args=(endpoint, link), daemon=True).start()

    def _run(self, endpoint: str, link: str) -> None:
        def carry(job: Send) -> None:
            while job.version in self.hang and not self.killed:
                time.sleep(0.01)
            if not self.killed:
                self.wire.put(read_tensors(job.path))

        serve_sends(endpoint, link, carry, stop=lambda: self.killed)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.holds: dict[str, torch.Tensor] = {}
        # vLLM's own hooks fill no parameter of it: its load is repeated by no plan.
        self.scale = torch.nn.Parameter(torch.ones(1))

    def load_weights(self, weights) -> None:
        self.holds |= {name: tensor.clone() for name, tensor in weights}


class Worker(WorkerExtension):
    """What vLLM's worker does, with a queue for a group. Loads in two calls, as from two buckets."""

    def __init__(self, wire: queue.Queue, lose: str = ""):
        self.wire, self.lose, self.vllm_config = wire, lose, VllmConfig()
        self.model, self.groups, self.steps = Model(), [], []
        parallel = SimpleNamespace(world_size=1, data_parallel_size=1, data_parallel_index=0, rank=0)
        self.weight_transfer_engine = SimpleNamespace(
            model=self.model, parallel_config=parallel, model_update_group=SimpleNamespace(disabled=False)
        )

        def reload(weights_iterator) -> None:
            self.model.load_weights(weights_iterator)

        self.model_runner = SimpleNamespace(get_model=lambda: self.model, reload_weights=reload)

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.groups.append(init_info)

    def start_weight_update(self) -> None:
        self.steps.append("start")

    def update_weights(self, info: dict) -> None:
        came = self.wire.get(timeout=240)
        assert list(came) == info["names"]
        assert [list(t.shape) for t in came.values()] == info["shapes"]
        assert [str(t.dtype) for t in came.values()] == [f"torch.{d}" for d in info["dtype_names"]]
        items = [(name, tensor) for name, tensor in came.items() if name != self.lose]
        self.model.load_weights(items[:1])
        self.model.load_weights(items[1:])

    def finish_weight_update(self) -> None:
        self.steps.append("finish")


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"z": torch.full((2, 3), 1.0 + version), "a": torch.arange(4.0) + version, "m": torch.zeros(0, 3)}


@pytest.fixture
def left_out(monkeypatch):
    names: list[str] = []
    monkeypatch.setattr(vllm_worker, "find_unfilled_modules", lambda model: names)
    return names


@pytest.fixture
def wire():
    return queue.Queue()


@pytest.fixture
def hang():
    return set()


def settings(timeout: float) -> tuple[WeightsConfig, TimeLimits]:
    return WeightsConfig(bucket_bytes=64), TimeLimits(base_install=timeout)


@pytest.fixture
def sender(tmp_path, wire, hang):
    made = NcclSender(tmp_path, "127.0.0.1", *settings(20.0), lambda endpoint, link: Beside(endpoint, link, wire, hang))
    yield made
    made.close()


def fetched(sender, version, receiver, timeout=240.0):
    publication = sender.publish_tensors(version, tensors(version), torch.bfloat16)
    return asyncio.run(receiver.fetch_version(publication.manifest, publication.transport_data, timeout))


def install(worker, manifest):
    worker.r3_install_version(msgspec.msgpack.encode(manifest))


def test_workers_hold_what_was_published_and_say_which_version(sender, wire, left_out):
    worker, receiver = Worker(wire), NcclReceiver("g0")
    for version in (0, 1):
        manifest = fetched(sender, version, receiver)
        install(worker, manifest)
        assert worker.r3_installed == (version, manifest.digest)
        for name, tensor in tensors(version).items():
            assert torch.equal(worker.model.holds[name], tensor.to(torch.bfloat16)), name
    assert len(worker.groups) == 1
    assert worker.groups[0]["world_size"] == 2
    assert worker.steps == ["start", "finish"] * 2
    restarted = Worker(wire)
    install(restarted, asyncio.run(NcclReceiver("g0").fetch_version(manifest, [manifest.source.endpoint], 20.0)))
    assert restarted.groups[0]["master_port"] != 0
    assert restarted.r3_nccl_link != worker.r3_nccl_link


def test_a_tensor_that_is_not_loaded_and_a_module_that_is_not_filled_are_named(sender, wire, left_out):
    receiver = NcclReceiver("g0")
    worker = Worker(wire, lose="m")
    with pytest.raises(WeightError, match="version 0: tensor 'm' was not loaded"):
        install(worker, fetched(sender, 0, receiver))
    assert worker.r3_installed == (-1, 0)
    left_out.append("layers.1")
    with pytest.raises(WeightError, match=r"version 1: vLLM's loader left out 'layers\.1'"):
        install(Worker(wire), fetched(sender, 1, receiver))


def test_a_file_is_loaded_under_the_same_watch(sender, wire, left_out):
    manifest = sender.publish_tensors(0, tensors(0), torch.bfloat16).manifest
    worker = Worker(wire)
    install(worker, manifest)
    assert worker.r3_installed == (0, manifest.digest)
    assert sorted(worker.model.holds) == ["a", "m", "z"]
    assert worker.groups == []
    with pytest.raises(WeightError, match="'z' was not loaded"):
        worker.r3_reload_tensors(manifest, [(name, tensor) for name, tensor in tensors(0).items() if name != "z"])
    assert worker.model.load_weights.__func__ is Model.load_weights


def test_a_group_without_nccl_would_send_nothing_and_is_refused(sender, wire, left_out):
    worker = Worker(wire)
    worker.weight_transfer_engine.model_update_group.disabled = True
    with pytest.raises(WeightError, match="VLLM_DISABLE_PYNCCL"):
        install(worker, fetched(sender, 0, NcclReceiver("g0")))
    assert worker.r3_nccl_link == ""


def test_the_learner_continues_publishing_while_a_generator_hangs(sender, wire, hang, left_out):
    hang.add(0)
    manifest = fetched(sender, 0, NcclReceiver("g0"))
    assert isinstance(request_receive_offer(manifest, 0, 1), Offer)  # and this worker dies in the middle
    before = time.monotonic()
    worker = Worker(wire)
    install(worker, fetched(sender, 1, NcclReceiver("g1")))
    assert worker.r3_installed[0] == 1
    sender.close()
    assert time.monotonic() - before < 10


def test_nothing_waits_for_a_lost_learner(sender, tmp_path):
    manifest = fetched(sender, 0, NcclReceiver("g0"), timeout=0.3)
    sender.close()
    with pytest.raises(WeightError, match=r"no answer from the learner at tcp://127.* within 0\.3 s"):
        request_receive_offer(manifest, 0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.long
def test_without_cuda_the_real_process_ends_and_the_worker_gets_the_reason(tmp_path):
    with pytest.raises(RuntimeError, match="needs CUDA"):
        make_nccl_sender()
    with contextlib.closing(NcclSender(tmp_path, "127.0.0.1", *settings(100.0))) as sender:
        manifest = fetched(sender, 0, NcclReceiver("g0"), timeout=100.0)
        with pytest.raises(WeightError, match=r"version 0 was not sent: the process .* ended with code 1"):
            request_receive_offer(manifest, 0, 1)


def test_what_vllm_cannot_pack_is_refused(sender):
    with pytest.raises(WeightError, match="'scale' is a scalar"):
        sender.publish_tensors(0, {"scale": torch.tensor(1.0)}, torch.bfloat16)


def test_tensors_of_any_width_travel_in_an_order_that_vllm_can_unpack(sender):
    """None begins where its elements cannot, in buckets of any size: the widest come first, at both ends."""
    given = {
        "a": torch.arange(3.0),
        "b.e_score_correction_bias": torch.arange(3.0) / 3,
        "c": torch.arange(5, dtype=torch.int64),
        "d": torch.arange(7.0),
    }
    manifest = sender.publish_tensors(0, given, torch.bfloat16).manifest
    found = read_tensors(manifest.path)
    assert list(found) == ["c", "b.e_score_correction_bias", "a", "d"]
    widths = {name: getattr(torch, entry.dtype).itemsize for name, entry in manifest.tensors.items()}
    assert order_tensor_names(widths) == list(found)
    packed = torch.cat([tensor.view(torch.uint8).view(-1) for tensor in found.values()])
    parts = packed.split([tensor.nbytes for tensor in found.values()])
    for part, tensor in zip(parts, found.values(), strict=True):  # as vLLM's `unpack_tensor` does
        assert torch.equal(part.contiguous().view(tensor.dtype), tensor)


def test_the_way_is_no_part_of_the_contents_and_there_is_no_file_to_verify(sender):
    publication = sender.publish_tensors(0, tensors(0), torch.bfloat16)
    manifest = asyncio.run(NcclReceiver("g0").fetch_version(publication.manifest, publication.transport_data, 1.0))
    assert manifest.digest == publication.manifest.digest
    elsewhere = msgspec.structs.replace(manifest, path="/not/here")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(elsewhere), type=WeightManifest) == elsewhere
    verify_manifest(elsewhere, {"a"})
    with pytest.raises(WeightError, match="'b' is missing"):
        verify_manifest(elsewhere, {"b"})


def test_the_backend_is_refused_where_it_cannot_work():
    def chosen(learner, engines, *overrides, hosts=("a",)):
        return choose_weight_backend(load_config("quickstart", list(overrides)), set(hosts), learner, engines)

    nccl = "weights.backend=nccl"
    assert chosen(["gpu-1"], [["gpu-2"]]) == "shared_memory"  # `auto`
    assert chosen(["gpu-1"], [["gpu-2", "gpu-3"], ["gpu-4"]], nccl) == "nccl"
    with pytest.raises(ValueError, match=r'weights\.backend="nccl".* no CUDA for the learner and an engine'):
        chosen([], [[]], nccl)
    with pytest.raises(ValueError, match=r"no CUDA for an engine"):
        chosen(["gpu-1"], [["gpu-2"], []], nccl)
    with pytest.raises(ValueError, match=r"share GPU gpu-1.*weights\.backend"):
        chosen(["gpu-1"], [["gpu-2"], ["gpu-1"]], nccl)
    for host in ("127.0.0.1", "0.0.0.0"):
        trusted = (nccl, f"transport.host={host}", "transport.trusted_network=true")
        with pytest.raises(ValueError, match=r"transport\.host"):
            chosen(["gpu-1"], [["gpu-2"]], *trusted, hosts=("a", "b"))
    for host in ("10.0.0.1", ""):  # unset: the address of the learner's host
        keys = (nccl, f"transport.host={host}", "transport.keys=keys")
        with pytest.raises(ValueError, match=r"knows no keys.*transport\.trusted_network"):
            chosen(["gpu-1"], [["gpu-2"]], *keys, hosts=("a", "b"))
        assert chosen(["gpu-1"], [["gpu-2"]], *keys, "transport.trusted_network=true", hosts=("a", "b")) == "nccl"


def test_vllm_takes_what_it_is_given():
    """Names of fields and methods, as far as they can be seen without a GPU."""
    nccl = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker

    worker = Worker(queue.Queue())
    worker.update_weights = lambda info: (
        nccl.NCCLWeightTransferUpdateInfo(**info)
        and worker.model.load_weights([(name, torch.zeros(1)) for name in info["names"]])
    )
    worker.init_weight_transfer_engine = lambda info: worker.groups.append(nccl.NCCLWeightTransferInitInfo(**info))
    offer = Offer("link", "127.0.0.1", 5, 1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_worker, "request_receive_offer", lambda *_: offer)
        patch.setattr(vllm_worker, "find_unfilled_modules", lambda model: [])
        from r3async.weights.manifest import NcclSource, TensorEntry

        source = NcclSource("tcp://x", "g0", "r", 1.0)
        worker.r3_receive_tensors(WeightManifest(0, "", {"w": TensorEntry("bfloat16", (1,), 0)}, 2, source))
    assert worker.groups[0].master_port == 5
    trainer = nccl.NCCLTrainerInitInfo(
        rank=0, master_address="x", master_port=5, world_size=2, packed_buffer_size_bytes=1024
    )
    for name in ("packed", "packed_buffer_size_bytes", "packed_num_buffers", "master_port", "world_size"):
        assert getattr(trainer, name) == getattr(worker.groups[0], name), name
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert hasattr(GpuWorker, name)
    ours = [name for name in dir(WorkerExtension) if not name.startswith("__")]
    assert not [name for name in ours if hasattr(GpuWorker, name)]  # vLLM refuses an extension that hides something


TIMEOUT = 60.0


class Machine:
    """`NcclLinkTable` with everything around it written down."""

    def __init__(self, versions=(0, 1, 2)):
        self.processes: dict[str, Process] = {}
        self.paths = {version: f"/v{version}" for version in versions}
        self.links = NcclLinkTable(
            "10.0.0.1",
            1024,
            TIMEOUT,
            start_process=self._start,
            paths=self.paths,
            find_port=lambda host: 4000 + len(self.processes),
        )

    def _start(self, name: str) -> Process:
        return self.processes.setdefault(name, Process())

    @property
    def names(self) -> list[str]:
        return list(self.processes)

    def ready(self, version, rank=0, *, generator="g0", receiver="a", workers=2, now=0.0):
        self.links.handle_message(
            f"{generator}.{rank}".encode(), Ready(generator, receiver, version, rank, workers), now
        )

    def ready_all(self, version, **options):
        for rank in (0, 1):
            self.ready(version, rank, **options)

    def take(self) -> list[tuple]:
        posted = [(to, decode_nccl_message(encode_nccl_message(message))) for to, message in self.links.outbox]
        self.links.outbox.clear()
        return posted

    def deliver(self, version, *, generator="g0", now=0.0, **kwargs):
        """All workers ask; the newest process is up and has sent."""
        self.ready_all(version, generator=generator, now=now, **kwargs)
        name = self.names[-1]
        self.links.handle_message(b"s" + name.encode(), Up(name), now)
        self.links.handle_message(b"s" + name.encode(), Sent(name, version), now)
        return name


def test_nobody_begins_before_everybody_is_there():
    machine = Machine()
    machine.ready(0, 1)
    (name,) = machine.names
    machine.links.handle_message(b"s", Up(name), 1.0)
    assert machine.take() == []
    machine.ready(0, 0)
    offer = Offer(name, "10.0.0.1", 4000, 1024)
    assert machine.take() == [(b"g0.1", offer), (b"g0.0", offer), (b"s", Send("/v0", 0, "10.0.0.1", 4000, 2, 1024))]
    machine.links.handle_message(b"s", Sent(name, 0), 2.0)
    machine.links.drop_overdue_links(1e6)  # idle: no limit
    machine.ready(1, 0, now=1e6)
    assert machine.take() == []
    machine.ready(1, 1, now=1e6)
    assert machine.take()[-1] == (b"s", Send("/v1", 1, "10.0.0.1", 4000, 2, 1024))
    assert machine.names == [name]


def test_workers_that_ask_before_the_process_is_up_wait_for_it():
    machine = Machine()
    machine.ready_all(0)
    assert machine.take() == []
    machine.links.handle_message(b"s", Up(machine.names[0]), 5.0)
    assert [type(m) for _, m in machine.take()] == [Offer, Offer, Send]


def test_a_generator_lost_in_the_middle_costs_only_its_own_process():
    machine = Machine()
    well = machine.deliver(0, generator="g1")
    machine.ready_all(0)
    stuck = machine.names[-1]
    machine.links.handle_message(b"s", Up(stuck), 0.0)
    machine.links.drop_overdue_links(TIMEOUT - 1)
    assert not machine.processes[stuck].killed
    machine.links.drop_overdue_links(TIMEOUT + 1)
    assert machine.processes[stuck].killed
    assert not machine.processes[well].killed
    machine.links.handle_message(b"s", Sent(stuck, 0), TIMEOUT + 2)  # too late, and ignored
    assert machine.deliver(0, receiver="b", now=TIMEOUT + 3) not in (stuck, well)
    assert len(machine.links) == 2


def test_a_generator_that_restarts_gets_a_new_group_at_once():
    machine = Machine()
    machine.ready(0, 0)
    (old,) = machine.names
    new = machine.deliver(0, receiver="b")
    assert machine.processes[old].killed
    assert not machine.processes[new].killed
    assert machine.take()[0] == (b"g0.0", Refused("version 0 was not sent: the generator has asked again"))


def test_a_group_in_which_something_went_wrong_is_not_used_again():
    machine = Machine()
    machine.ready_all(0)
    machine.links.handle_message(b"s", Up(machine.names[0]), 0.0)
    machine.take()
    machine.ready(0, 0, now=1.0)  # what it was offered, it did not get
    assert machine.processes[machine.names[0]].killed
    assert len(machine.names) == 2
    machine.ready(1, 1, now=1.0)  # one worker still waits for version 0
    assert machine.processes[machine.names[1]].killed
    assert len(machine.names) == 3


def test_the_next_version_waits_until_the_one_before_it_is_known_to_have_arrived():
    machine = Machine()
    for version in (0, 1):
        machine.ready_all(version)
        machine.links.handle_message(b"s", Up(machine.names[0]), 0.0)
    assert [m.version for _, m in machine.take() if isinstance(m, Send)] == [0]
    machine.links.handle_message(b"s", Sent(machine.names[0], 0), TIMEOUT - 1)
    assert [m.version for _, m in machine.take() if isinstance(m, Send)] == [1]
    machine.links.drop_overdue_links(2 * TIMEOUT - 2)
    machine.links.handle_message(b"s", Sent(machine.names[0], 1), 2 * TIMEOUT - 2)
    machine.ready_all(2, now=500.0)
    machine.take()
    machine.ready_all(1, now=501.0)
    machine.links.drop_overdue_links(501.0 + TIMEOUT)
    assert [type(m) for _, m in machine.take()] == [Refused, Refused]
    assert len(machine.names) == 1


def test_workers_get_the_reason_that_the_process_ended_that_too_few_came_and_that_a_version_is_lost():
    machine = Machine()
    machine.ready(0, 0)
    machine.processes[machine.names[0]].code = 3
    machine.links.drop_overdue_links(1.0)
    assert "ended with code 3" in machine.take()[0][1].reason
    machine.ready(0, 0)
    machine.links.drop_overdue_links(TIMEOUT + 1)
    assert "supervise.patience" in machine.take()[0][1].reason
    machine.ready(7, 0)
    assert machine.take() == [(b"g0.0", Refused("version 7 is not kept"))]
    machine.ready(1, 0)
    del machine.paths[1]
    machine.links.handle_message(b"s", Up(machine.names[-1]), 0.0)
    machine.links._links["g0"].waiting_workers[1] = b"g0.1"
    machine.links.handle_message(b"s", Up(machine.names[-1]), 0.0)
    assert [m.reason for _, m in machine.take()] == ["version 1 was not sent: a newer one has taken its place"] * 2
    machine.deliver(2)
    machine.links.close()
    assert all(p.killed or p.code for p in machine.processes.values())


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_the_group_listens_at_an_address_of_either_family(host):
    port = find_free_port(host)
    with listen_for_workers(host, port):
        group = StatelessProcessGroup.create(host, port, rank=0, world_size=1, store_timeout=5)
    assert group.broadcast_obj("here", src=0) == "here"
