"""Sampled sequences that are found again by spans or by their tokens, within bounds and after a restart."""

import numpy as np
import pytest

from r3async.data.tokens import UNSAMPLED_VERSION
from r3async.tinker.kept_sequences import FILES_KEPT, KeptSequence, KeptSequences
from r3async.tinker.protocol import ApiError, Datum, ProvenanceSpan
from tests.helpers.models import random_routes

LAYERS = 3
RNG = np.random.default_rng(5)


def keep(store, name, prompt, sampled, *, version=1, model="m", recorded=None):
    tokens = np.asarray([*prompt, *sampled], np.int32)
    routes = random_routes(RNG, len(tokens) - 1, LAYERS)
    recorded = np.ones(len(routes), bool) if recorded is None else recorded
    store.put(KeptSequence(name, model, version, len(prompt), tokens, routes, recorded))
    return routes


def datum(tokens, token_spans=(), target_spans=(), targets=None):
    targets = tokens[1:] if targets is None else targets
    inputs = {"target_tokens": np.asarray(targets, np.int64)}
    return Datum(np.asarray(tokens[:-1], np.int32), inputs, list(token_spans), list(target_spans))


def prompt_span(name, length, offset=0):
    return ProvenanceSpan(name, offset, length, sampled=False)


def sampled_span(name, length, offset=0):
    return ProvenanceSpan(name, offset, length, sampled=True)


@pytest.fixture
def store(tmp_path):
    return KeptSequences(tmp_path, max_bytes=2**20)


def test_spans_find_routes_and_versions(store):
    routes = keep(store, "s", [1, 2, 3], [4, 5, 6], version=7)
    one = datum(
        [1, 2, 3, 4, 5, 6],
        [prompt_span("s", 3), sampled_span("s", 2)],
        [prompt_span("s", 2, offset=1), sampled_span("s", 3)],
    )
    found = store.match_datum(0, one, "m")
    assert found.recorded.all()
    assert np.array_equal(found.routes, routes)
    assert found.versions.tolist() == [UNSAMPLED_VERSION, UNSAMPLED_VERSION, 7, 7, 7]


@pytest.mark.parametrize(
    "spans",
    [
        [prompt_span("s", 3), sampled_span("s", 2, offset=1)],  # others of its tokens
        [prompt_span("s", 3), sampled_span("other", 2)],
        [sampled_span("s", 5)],
        [prompt_span("s", 5)],  # beyond the prompt
        [prompt_span("s", 3), sampled_span("s", 2, offset=2**40)],
        [prompt_span("s", 3)],  # does not tile
        [prompt_span("s", 3), sampled_span("s", 3)],
    ],
)
def test_false_spans_are_refused(store, spans):
    keep(store, "s", [1, 2, 3], [4, 5, 6])
    keep(store, "other", [1, 2, 3], [9, 9, 9])
    with pytest.raises(ApiError, match="datum 3: the provenance spans of model_input") as refused:
        store.match_datum(3, datum([1, 2, 3, 4, 5, 6], spans), "m")
    assert refused.value.category == "user"


def test_false_spans_of_targets_are_refused(store):
    keep(store, "s", [1, 2, 3], [4, 5, 6])
    one = datum([1, 2, 3, 4, 5, 6], [], [prompt_span("s", 2), sampled_span("s", 3)])
    with pytest.raises(ApiError, match="target_tokens"):
        store.match_datum(0, one, "m")


def test_a_sequence_that_is_forgotten_leaves_its_tokens_to_the_routers(store):
    one = datum([1, 2, 3, 4], [sampled_span("gone", 3)])
    found = store.match_datum(0, one, "m")
    assert found.routes is None
    assert not found.recorded.any()


def test_without_spans_a_sequence_is_found_by_its_tokens(store):
    routes = keep(store, "a", [1, 2, 3], [4, 5, 6], version=1)
    keep(store, "b", [1, 2, 3], [4, 5, 7], version=2)
    keep(store, "c", [1, 2], [3, 5], version=3)
    for length in (6, 5):  # the whole sequence, and a shortened one
        found = store.match_datum(0, datum([1, 2, 3, 4, 5, 6][:length]), "m")
        assert found.recorded.all()
        if length == 6:
            assert np.array_equal(found.routes, routes)
            assert found.versions.tolist() == [-1, -1, 1, 1, 1]
    other = store.match_datum(0, datum([1, 2, 3, 4, 5, 7]), "m")
    assert other.versions.tolist() == [-1, -1, 2, 2, 2]
    keep(store, "again", [1, 2, 3], [4, 5, 6], version=9)  # of equal ones the newest
    assert store.match_datum(0, datum([1, 2, 3, 4, 5, 6]), "m").versions.max() == 9
    found = store.match_datum(0, datum([1, 2, 3, 4, 9, 9]), "m")
    assert found.routes is None


def test_turns_of_an_episode_each_give_their_rows_and_the_first_owns_a_position(store):
    first = keep(store, "t0", [1, 2], [3, 4], version=1)
    second = keep(store, "t1", [1, 2, 3, 4, 5], [6, 7], version=2)
    whole = [1, 2, 3, 4, 5, 6, 7]
    spans = [prompt_span("t0", 2), sampled_span("t0", 2), prompt_span("t1", 1, offset=4), sampled_span("t1", 1)]
    for one in (datum(whole, spans), datum(whole)):
        found = store.match_datum(0, one, "m")
        assert found.recorded.all()
        assert np.array_equal(found.routes[:3], first)  # the first turn fed three of its four tokens
        assert np.array_equal(found.routes[3:], second[3:])
        assert found.versions.tolist() == [-1, 1, 1, -1, 2, 2]


def test_routes_of_another_context_are_not_taken(store):
    keep(store, "s", [1, 2, 3], [4, 5, 6])
    shortened = datum([3, 4, 5, 6], [prompt_span("s", 1, offset=2), sampled_span("s", 2)])
    found = store.match_datum(0, shortened, "m")
    assert not found.recorded.any()


def test_rows_that_the_engine_did_not_record_stay_so(store):
    recorded = np.array([False, False, True, True, True])
    keep(store, "s", [1, 2, 3], [4, 5, 6], recorded=recorded)
    found = store.match_datum(0, datum([1, 2, 3, 4, 5, 6]), "m")
    assert np.array_equal(found.recorded, recorded)
    assert found.routes[0].tolist() == [[0, 1]] * LAYERS  # distinct ids


def test_versions_of_another_model_are_no_age(store):
    keep(store, "s", [1, 2, 3], [4, 5, 6], model="teacher")
    found = store.match_datum(0, datum([1, 2, 3, 4, 5, 6]), "m")
    assert found.recorded.all()
    assert (found.versions == UNSAMPLED_VERSION).all()


def test_targets_of_two_dimensions_have_routes_and_no_age(store):
    keep(store, "s", [1, 2, 3], [4, 5, 6])
    one = datum([1, 2, 3, 4, 5, 6], [prompt_span("s", 3), sampled_span("s", 2)], targets=[[1, 2]] * 5)
    found = store.match_datum(0, one, "m")
    assert found.recorded.all()
    assert (found.versions == UNSAMPLED_VERSION).all()


def test_sequences_survive_a_restart_and_a_torn_end(tmp_path):
    store = KeptSequences(tmp_path, max_bytes=2**20)
    routes = keep(store, "a", [1, 2, 3], [4, 5, 6])
    keep(store, "b", [1, 2, 3], [7, 8])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])  # killed in the middle of the second record
    again = KeptSequences(tmp_path, max_bytes=2**20)
    assert len(again) == 1
    assert np.array_equal(again.match_datum(0, datum([1, 2, 3, 4, 5, 6]), "m").routes, routes)
    keep(again, "c", [9], [9, 9])
    assert len(KeptSequences(tmp_path, max_bytes=2**20)) == 2


def test_a_record_that_the_disk_changed_is_not_taken(tmp_path):
    keep(KeptSequences(tmp_path, max_bytes=2**20), "a", [1, 2, 3], [4, 5, 6])
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert len(KeptSequences(tmp_path, max_bytes=2**20)) == 0


def test_disk_is_bounded_and_the_oldest_go(tmp_path):
    store = KeptSequences(tmp_path, max_bytes=64 * 1024)
    for number in range(400):
        keep(store, f"s{number}", [number, 1], [2, 3, number])
        assert store.nbytes <= 64 * 1024
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert used == store.nbytes
    assert len(list(tmp_path.iterdir())) <= FILES_KEPT + 1
    assert store.find("s0") is None
    assert store.find("s399") is not None
    assert 100 < len(store) < 400
    assert not store.match_datum(0, datum([0, 1, 2, 3, 0]), "m").recorded.any()


def test_routes_are_packed_as_on_the_wire(tmp_path):
    """48 layers with 8 of 128 experts: 7 bits an id."""
    store = KeptSequences(tmp_path, max_bytes=2**30)
    length = 1000
    rng = np.random.default_rng(0)
    routes = rng.integers(0, 128, (length - 1, 48, 8)).astype(np.uint8)
    tokens = rng.integers(0, 1000, length).astype(np.int32)
    store.put(KeptSequence("s", "m", 0, 100, tokens, routes, np.ones(length - 1, bool)))
    assert np.array_equal(store.find("s").routes, routes)
    assert store.nbytes * 10_000 < 5 * 2**30
