"""`r3async scale`: what it takes, whom it asks, and what it says; and the places that further engines get."""

import threading
import time

import pytest

from r3async.actors.fleet_scaler import (
    SCALE_REQUEST_FILE,
    ScaleRequest,
    read_scale_request,
    with_requested_scale,
    write_scale_request,
)
from r3async.actors.placement_plan import ResourceDemand, make_supposed_hosts, plan_engine, plan_layout
from r3async.actors.weight_transport import check_can_join, check_learner_reachable, choose_weight_backend
from r3async.checkpoint.run_lock import RunLock
from r3async.config import ConfigError, load_config
from r3async.record.events import open_event_log
from r3async.tools import scale
from r3async.tools.scale import parse_generators, scale_run
from r3async.world import ClusterNode, InsufficientResourcesError


@pytest.mark.parametrize(
    "words", [["4"], ["generators"], ["generators=x"], ["ranks=2"], ["generators=1", "generators=2"]]
)
def test_other_words_are_refused_with_an_example(words):
    with pytest.raises(ConfigError, match="generators=4"):
        parse_generators(words)


@pytest.mark.parametrize("count", [0, 4097])
def test_a_run_has_a_generator_and_not_thousands(count):
    with pytest.raises(ConfigError, match="1 to 4,096"):
        parse_generators([f"generators={count}"])
    assert parse_generators(["generators=12"]) == 12


@pytest.fixture
def left_run(tmp_path):
    """A run whose command was killed: nothing says that it has ended."""
    (tmp_path / "config.toml").write_text("steps = 3\n")
    return tmp_path


@pytest.fixture
def run_dir(left_run):
    """A run that a process makes."""
    lock = RunLock(left_run)
    lock.acquire_shared()
    yield left_run
    lock.close()


@pytest.mark.parametrize("was_locked", [False, True])
def test_a_run_that_nobody_makes_is_refused_at_once(left_run, was_locked):
    if was_locked:
        RunLock(left_run).close()
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"is not running .*resumed"):
        scale_run(left_run, 3, 20.0, print)
    assert time.monotonic() - began < 2.0
    assert read_scale_request(left_run) is None


def answered(run_dir, *events):
    """A driver that says this as soon as it is asked."""

    def answer():
        while (wish := read_scale_request(run_dir)) is None:
            time.sleep(0.01)
        log = open_event_log(run_dir, "driver")
        for name, facts in events:
            log.info(name, **({"asked": wish.asked} if name.startswith("scal") else {}), **facts)

    thread = threading.Thread(target=answer)
    thread.start()
    said = []
    code = scale_run(run_dir, 3, 20.0, said.append)
    thread.join()
    return code, said


def test_it_says_who_joins_and_ends_when_all_are_there(run_dir):
    code, said = answered(
        run_dir,
        ("scaling", {"generators": 3, "of": 1}),
        ("scale_waits", {"generators": 1, "reason": "another engine needs 1 GPU"}),
        ("generator_joined", {"generator": "generator-1", "host": "b", "version": 7}),
        ("generator_left", {"generator": "generator-0", "leased_again": [4, 5]}),
        ("scaled", {"generators": 3, "of": 1}),
    )
    assert code == 0
    assert said == [
        "waiting for a place: another engine needs 1 GPU",
        "generator-1 on b generates, with version 7 of the weights",
        "generator-0 has left; others generate its groups 4, 5",
        f"{run_dir.name} has 3 generators, and had 1",
    ]


def test_a_refusal_and_the_end_of_the_run_are_failures(run_dir):
    refused = ("scale_refused", {"generators": 1, "of": 1, "reason": "generator-1: it has other tasks"})
    code, said = answered(run_dir, refused)
    assert (code, said) == (1, [f"{run_dir.name} has 1 generators: generator-1: it has other tasks"])
    (run_dir / SCALE_REQUEST_FILE).unlink()
    code, said = answered(run_dir, ("run_finished", {}))
    assert (code, said) == (1, [f"{run_dir.name} ended before it had 3 generators"])
    with pytest.raises(ConfigError, match="is not running"):
        scale_run(run_dir, 3, 1.0, print)


def test_where_nobody_answers_that_is_said(run_dir, monkeypatch):
    monkeypatch.setattr(scale, "ANSWER_TIMEOUT_SECONDS", 0.3)
    with pytest.raises(ConfigError, match="nobody answers"):
        scale_run(run_dir, 3, 10.0, print)


def test_what_has_not_come_in_time_goes_on(run_dir, monkeypatch):
    monkeypatch.setattr(scale, "ANSWER_TIMEOUT_SECONDS", 0.3)
    write_scale_request(run_dir, ScaleRequest(9, "before"))
    thread = threading.Thread(target=lambda: time.sleep(0.1))
    thread.start()
    said = []
    log = open_event_log(run_dir, "driver")
    monkeypatch.setattr(
        scale, "write_scale_request", lambda path, wish: log.info("scaling", generators=3, of=1, asked=wish.asked)
    )
    assert scale_run(run_dir, 3, 1.0, said.append) == 3
    assert "continues to try" in said[-1]


def test_a_wish_that_cannot_be_read_is_none(tmp_path):
    config = load_config("quickstart", ["generator.count=2"])
    assert with_requested_scale(config, tmp_path) is config
    for text in ("", "{", '{"generators": 0, "asked": "x"}', '{"generators": "many", "asked": "x"}'):
        (tmp_path / SCALE_REQUEST_FILE).write_text(text)
        assert read_scale_request(tmp_path) is None
    write_scale_request(tmp_path, ScaleRequest(5, "x"))
    assert with_requested_scale(config, tmp_path).generator.count == 5
    assert config.generator.count == 2


# -- places ------------------------------------------------------------------------------------------------------------


def test_another_engine_is_rather_on_a_host_of_the_learner_and_on_one_host_whole():
    demand = ResourceDemand(ranks=1, ranks_per_host=1, engines=1, devices_per_engine=2)
    nodes = make_supposed_hosts(3, 2)
    assert plan_engine(demand, nodes, ["host-2"]).node_id == "host-2"
    assert plan_engine(demand, nodes, ["host-9"]).node_id == "host-0"
    full = [ClusterNode(n.node_id, n.name, 8, 2, 8, 1) for n in nodes]
    with pytest.raises(
        InsufficientResourcesError, match=r"another engine needs 2 GPUs of one host .*1 of 2 GPUs free.*add a host"
    ):
        plan_engine(demand, full, [])


def test_the_learner_is_where_the_run_is_started_if_all_engines_have_a_place_then():
    def nodes(home):
        return [
            ClusterNode(f"host-{i}", f"host-{i}", 16, gpus, 16, gpus, is_local=i == home)
            for i, gpus in enumerate((8, 4, 2))
        ]

    def hosts(home, **demand):
        layout = plan_layout(ResourceDemand(ranks_per_host=1, devices_per_engine=1, **demand), nodes(home))
        return set(layout.rank_hosts())

    assert [hosts(home, ranks=2, engines=4) for home in (0, 1, 2)] == [{"host-0"}, {"host-1"}, {"host-2"}]
    assert hosts(2, ranks=4, engines=1) == {"host-1"}, "it has not enough"


def loopback_and_open():
    return [load_config("quickstart", [f"transport.host={host}"]) for host in ("127.0.0.1", "0.0.0.0")]


def test_engines_on_other_hosts_must_reach_the_learner():
    loopback, open_ = loopback_and_open()
    check_learner_reachable(loopback, "a", ["a", "a"])
    check_learner_reachable(open_, "a", ["a", "b"])
    check_learner_reachable(load_config("quickstart"), "a", ["a", "b"])
    with pytest.raises(ConfigError, match=r"`transport.host` = '127.0.0.1'.*leave it out"):
        check_learner_reachable(loopback, "a", ["a", "b"])


def test_who_joins_must_be_reached_by_the_weights():
    loopback, open_ = loopback_and_open()
    assert choose_weight_backend(loopback, {"a"}) == "shared_memory"
    assert choose_weight_backend(open_, {"a"}) == "tcp", "others may join"
    check_can_join(loopback, "shared_memory", {"a"}, "a")
    check_can_join(open_, "tcp", {"a"}, "b")
    for config, backend, reason in (
        (loopback, "shared_memory", "transport.host"),
        (open_, "shared_memory", 'weights.backend="tcp"'),
        (open_, "nccl", 'weights.backend="tcp"'),
    ):
        with pytest.raises(ValueError, match=reason):
            check_can_join(config, backend, {"a"}, "b")
