"""The bound on age is what can happen: never more, and in some order exactly that."""

import itertools

import pytest

from r3async.schedule.staleness_check import StalenessError, check_staleness, compute_staleness_metrics
from tests.helpers.schedule import Run, Shape, episode


def worst(shape: Shape) -> int:
    """The age that an adversary reaches in a run of the real scheduler: the last group of the first slots is played with
    version 0 and finished only when nothing can go on without it; everything else is done at once."""
    run = Run(shape, players=1)
    late = run.admission.slots - 1
    player = run.players["p0"]
    while late not in run.trained:
        while run.lease("p0", 1000):
            pass
        for key in [k for k in player.playing if k[0] != late]:
            player.outbox[key] = player.playing.pop(key)
        while run.arrive("p0"):
            pass
        moved = run.train()
        moved |= run.publish()
        moved |= run.install()
        if not moved:
            assert run.finish("p0")
            assert run.arrive("p0")
        run.check()
    return run.oldest


GRID = list(itertools.product(range(4), (1, 2, 3, 5), (1, 2, 3), (1, 2, 3, 4, 5, 6, 8, 11, 16)))


def test_for_every_setting_there_is_an_order_that_reaches_the_bound():
    for staleness, per_step, per_version, window in GRID:
        enough = staleness + window + 3  # versions: at least so many that nothing ends before the late group is trained
        shape = Shape(staleness, per_step, per_version, samples=1, window=window, versions=enough)
        assert worst(shape) == shape.bound, shape


@pytest.mark.long
@pytest.mark.parametrize(
    ("staleness", "per_step", "per_version", "window"),
    [(0, 2, 1, 3), (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3), (1, 2, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2)],
)
def test_no_order_at_all_exceeds_the_bound_and_none_gets_stuck(staleness, per_step, per_version, window):
    """Every order of leases, arrivals, steps and installations of a short run: all of its states are visited."""
    versions = 4 if per_step * per_version == 2 else 6
    shape = Shape(staleness, per_step, per_version, samples=1, window=window, versions=versions)
    seen, waiting, oldest, ends = set(), [()], 0, 0
    while waiting:
        run, path = Run(shape, players=1), waiting.pop()
        for move in path:
            make_move(run, move)
        while (state := state_of(run)) not in seen:  # on from there, always by the first move
            seen.add(state)
            oldest, ends, moves = max(oldest, run.oldest), ends + run.done, possible_moves(run)
            assert moves or run.done, f"stuck after {path}"
            if moves:
                waiting += [(*path, move) for move in moves[1:]]
                path = (*path, moves[0])
                make_move(run, moves[0])
    assert ends
    assert oldest == shape.bound


def make_move(run, move):
    player = run.players["p0"]
    if move == "lease":
        run.lease("p0", 1000)
    elif move == "train":
        run.train()
    elif move == "install":
        run.publish()
        run.install()
    else:
        player.outbox[move, 0] = player.playing.pop((move, 0))
        run.arrive("p0")


def state_of(run):
    player, taken = run.players["p0"], run.buffer.consumed
    playing = tuple(sorted((g, v) for (g, _), v in player.playing.items()))
    here = tuple(
        (group, int(trajectory.samples[0].table["policy_version"][1]))
        for group in run.buffer.list_task_seeds()
        for trajectory in run.buffer.episodes_of([group])[0]
    )
    held = tuple(sorted(player.held.items()))
    return (playing, held, here, taken.head, tuple(sorted(taken.beyond_head)), run.steps, player.version, run.oldest)


def possible_moves(run):
    if run.done:
        return []
    player = run.players["p0"]
    moves = [group for group, _ in sorted(player.playing)]
    moves += ["lease"] * run.admission.can_lease()
    moves += ["train"] * bool(run.batch())
    return moves + ["install"] * (player.version < run.learner_version)


def test_a_token_older_than_the_bound_stops_the_run_and_is_named():
    young, old = [episode(6, 0, 5, 0)], [episode(7, 0, 5, 0), episode(7, 1, 2, 0)]
    check_staleness([young, old], version=5, bound=3)
    with pytest.raises(
        StalenessError, match=r"group 7 holds a token of age 4 \(trajectory g7e1 .*version 6.* at most 3"
    ):
        check_staleness([young, old], version=6, bound=3)


def test_ages_are_counted_by_token_with_the_time_they_queued():
    groups = [[episode(0, 0, 5, 0), episode(0, 1, 3, 0)], [episode(1, 0, 4, 0), episode(1, 1, 5, 0)]]
    for i, trajectory in enumerate(t for g in groups for t in g):
        trajectory.finished_at = 100.0 + i
    assert compute_staleness_metrics(groups, version=5, bound=3, now=110.0, max_token_age=1) == {
        "staleness/mean": 0.75,
        "staleness/max": 2.0,
        "staleness/bound": 3.0,
        "staleness/masked_fraction": 0.25,
        "staleness/queue_seconds_mean": 8.5,
        "staleness/queue_seconds_max": 10.0,
        "staleness/tokens_0": 2.0,
        "staleness/tokens_1": 1.0,
        "staleness/tokens_2": 1.0,
        "staleness/tokens_3": 0.0,
    }
