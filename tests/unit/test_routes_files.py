"""Files of traced routes: read back as they were written, damage reported, and several ranks' parts put together."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from r3async.data.routes import RoutingError
from r3async.learner import RouteTrace
from r3async.record import routes
from r3async.record.routes import (
    ROUTES_CONTAINER,
    EngineCall,
    RouteFile,
    RouteFileError,
    RouteIndex,
    TrainedRoutes,
    load_route_record,
    merge_traces,
    scan_route_file,
    verify_routes,
)
from tests.helpers.routes import ID, LAYERS, episode, experts

# --- files


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    trained, calls = episode()
    RouteFile(tmp_path / "routes", "learner").append(trained)
    engine = RouteFile(tmp_path / "routes", "engine-generator-0")
    for each in reversed(calls):
        engine.append(each)
    index = RouteIndex(tmp_path)
    assert index.problems == []
    (entry,) = index.trained_entries
    again = load_route_record(entry, TrainedRoutes)
    for name, value in msgspec.structs.asdict(trained).items():
        found = getattr(again, name)
        np.testing.assert_array_equal(found, value)
        assert not isinstance(value, np.ndarray) or (found.dtype, found.shape) == (value.dtype, value.shape)
    assert [c.turn for c in index.load_calls(ID)] == [0, 1], "in order of time, not of writing"
    assert verify_routes(index).is_verified
    with pytest.raises(RouteFileError, match="a record of TrainedRoutes"):
        load_route_record(entry, EngineCall)


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_torn_file_is_read_up_to_there_and_reported(tmp_path: Path, cut: int) -> None:
    file = RouteFile(tmp_path / "routes", "learner")
    trained, _ = episode()
    file.append(trained)
    path = tmp_path / "routes" / "learner.0.routes"
    whole = path.stat().st_size
    file.append(trained)
    path.write_bytes(path.read_bytes()[: min(whole + cut, 2 * whole - 1)])
    entries, problem = scan_route_file(path)
    assert len(entries) == 1
    assert f"from byte {whole} on there is no record" in problem
    assert "its process was killed, or is still writing" in problem
    index = RouteIndex(tmp_path)
    assert len(index.trained_entries) == 1
    assert index.problems == [problem]


def test_damage_is_reported_and_not_taken_for_routes(tmp_path: Path) -> None:
    file = RouteFile(tmp_path, "learner")
    trained, _ = episode()
    file.append(trained)
    path = tmp_path / "learner.0.routes"
    good = path.read_bytes()
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])  # the last 7 bytes may be padding
    ((entry,), problem) = scan_route_file(path)
    assert problem == ""
    with pytest.raises(RouteFileError, match=r"learner\.0\.routes: the record at byte \d+ is damaged"):
        load_route_record(entry, TrainedRoutes)
    header = good.index(b"kind")
    path.write_bytes(good[:header] + bytes([good[header] ^ 1]) + good[header + 1 :] + good)
    assert scan_route_file(path)[0] == []
    assert "the record at byte 0 is damaged" in scan_route_file(path)[1]
    path.write_bytes(good + b"something else entirely, longer than a frame's head")
    assert (
        f"from byte {len(good)} on there is no record: b'somethin' is not the beginning of a record"
        in scan_route_file(path)[1]
    )
    path.write_bytes(b"R3RT" + good[4:])  # before they were containers
    assert scan_route_file(path)[0] == []
    assert "is not the beginning of a record, which is b'r3route2'" in scan_route_file(path)[1]


def test_a_process_that_comes_back_writes_a_file_of_its_own(tmp_path: Path) -> None:
    trained, _ = episode()
    for _ in range(3):
        RouteFile(tmp_path, "learner").append(trained)
    RouteFile(tmp_path, "idle")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"learner.{n}.routes" for n in range(3)]


def test_threads_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RouteFile(tmp_path, "learner")
    opened = file._open_file
    monkeypatch.setattr(
        file, "_open_file", lambda: (time.sleep(0.05), opened())[1]
    )  # so that all of them want to open it
    trained, _ = episode()
    threads = [threading.Thread(target=lambda: [file.append(trained) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    entries, problem = scan_route_file(tmp_path / "learner.0.routes")
    assert (len(entries), problem) == (200, "")
    assert len(list(tmp_path.iterdir())) == 1


# --- several ranks


def parts(trace: RouteTrace, rows: list[slice], columns: list[list[int]]) -> list[RouteTrace]:
    return [
        msgspec.structs.replace(trace, first=r.start, columns=c, own=trace.own[r][:, c], used=trace.used[r][:, c])
        for r in rows
        for c in columns
    ]


def whole_trace(name: str = "a", tokens: int = 11) -> RouteTrace:
    cu_seqlens = np.asarray([0, 4, tokens], np.int32)
    own, used = (experts(seed, tokens).astype(np.uint16) for seed in (1, 2))
    return RouteTrace((f"{name}0", f"{name}1"), cu_seqlens, 0, list(range(LAYERS)), own, used)


def assert_same(one: RouteTrace, other: RouteTrace) -> None:
    assert (one.sample_ids, one.first, one.columns) == (other.sample_ids, other.first, other.columns)
    np.testing.assert_array_equal(one.own, other.own)
    np.testing.assert_array_equal(one.used, other.used)


def test_traces_split_by_tokens_and_layers_are_put_together() -> None:
    one, other = whole_trace("a"), whole_trace("b", 6)
    # Tensor parallel over padded tokens: the last rank has padding only, and so no row at all.
    split = parts(one, [slice(0, 4), slice(4, 8), slice(8, 11), slice(11, 11)], [[0, 2], [1]])
    split += parts(other, [slice(0, 6)], [[1], [0], [2]])
    padding = RouteTrace((), np.zeros(1, np.int32), 0, [0], one.own[:0, :1], one.used[:0, :1])
    merged = merge_traces([*reversed(split), padding, split[0]], LAYERS)
    assert len(merged) == 2
    assert_same(merged[1], one)
    assert_same(merged[0], other)


def test_log_probs_of_the_last_stage_are_kept_beside_routes_of_the_others() -> None:
    first, last = parts(whole_trace(), [slice(0, 11)], [[0, 1], [2]])
    nothing = np.zeros((0, 0, 0), np.uint16)
    scores = np.linspace(-2, 0, 11, dtype=np.float32)
    for split in (
        [first, msgspec.structs.replace(last, logprobs=scores)],
        # The last stage has no MoE layer.
        [msgspec.structs.replace(last, columns=[], own=nothing, used=nothing, logprobs=scores), first, last],
    ):
        (merged,) = merge_traces(split, LAYERS)
        assert_same(merged, whole_trace())
        np.testing.assert_array_equal(merged.logprobs, scores)


def test_a_part_that_is_missing_or_contradicts_is_refused() -> None:
    split = parts(whole_trace(), [slice(0, 4), slice(4, 11)], [[0, 1], [2]])
    with pytest.raises(RoutingError, match=r"no trace has row 4 of MoE layer 2 in the micro-batch of a0"):
        merge_traces(split[:3], LAYERS)
    changed = split[1].used.copy()
    changed[0, 0] = changed[0, 0] + 1
    with pytest.raises(RoutingError, match="contradict"):
        merge_traces([*split, msgspec.structs.replace(split[1], used=changed)], LAYERS)


# --- an index that is read on


def test_an_index_reads_on_where_it_stopped_and_never_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, calls = episode()
    learner, engine = RouteFile(tmp_path / "routes", "learner"), RouteFile(tmp_path / "routes", "engine-0")
    index = RouteIndex(tmp_path)
    assert index.read_new() == []
    scanned: list[int] = []
    monkeypatch.setattr(
        routes,
        "scan_route_file",
        lambda path, at, files: (scanned.append(at), scan_route_file(path, at, files=files))[1],
    )
    for step in (1, 2, 3):
        learner.append(msgspec.structs.replace(trained, step=step))
        engine.append(calls[step % 2])
        assert [entry.facts["step"] for entry in index.read_new()] == [step]
        assert index.read_new() == []
    assert scanned[-1] > scanned[0] == 0, "from its last record on"
    with learner.path.open("ab") as file:
        file.write(ROUTES_CONTAINER.magic + b"half")
    assert index.read_new() == []
    assert "no record" in index.problems[0]
    whole = RouteIndex(tmp_path)
    assert (index.trained_entries, index.call_entries) == (whole.trained_entries, whole.call_entries)
    assert [entry.facts["time"] for entry in index.call_entries[ID]] == [0.0, 1.0, 1.0]
