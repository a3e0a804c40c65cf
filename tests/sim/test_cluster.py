"""Predicting how fast a cluster trains: what follows from arithmetic, and the production scheduler's own bounds."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.schedule.admission import worst_case_staleness
from r3async.tools.capacity.cluster import Distribution, EngineSpeed, LearnerSpeed, Model, Sharing, predict

ONE = Model(
    generators=1,
    places=64,
    prompts_per_step=4,
    group_size=2,
    max_staleness=0,
    engine=EngineSpeed(0.01),
    learner=LearnerSpeed(3.0),
    turns=Distribution(1),
    answer=Distribution(100),
)


def changed(**settings: object) -> Model:
    return msgspec.structs.replace(ONE, **settings)


def test_on_policy_one_thing_comes_after_the_other() -> None:
    weights = LearnerSpeed(3.0, snapshot=0.1, write=0.2, transfer=0.3, pause=0.4)
    made = predict(changed(learner=weights, tool=Distribution(0.5)), steps=12, settle=2)
    # Generation, tool, step, copy, write, transfer, pause.
    assert made.seconds_per_step == pytest.approx(1.0 + 0.5 + 3.0 + 0.1 + 0.2 + 0.3 + 0.4, rel=1e-6)
    assert made.max_age == 0
    assert made.learner_idle == pytest.approx(2.4 / 5.5, rel=1e-6)


def test_with_slots_enough_the_slower_side_decides() -> None:
    slow_learner = predict(changed(max_staleness=4), steps=40, settle=10)
    assert slow_learner.seconds_per_step == pytest.approx(3.0, rel=0.01)
    assert slow_learner.learner_idle < 0.01
    slow_engine = predict(changed(max_staleness=4, learner=LearnerSpeed(0.1), places=8), steps=40, settle=10)
    assert slow_engine.seconds_per_step == pytest.approx(1.0, rel=0.05)
    assert slow_engine.engine_idle < 0.05


def test_requests_share_an_engine() -> None:
    alone = predict(changed(learner=LearnerSpeed(0.0)), steps=8, settle=2)
    shared = predict(changed(learner=LearnerSpeed(0.0), engine=EngineSpeed(0.01, 0.01)), steps=8, settle=2)
    assert alone.seconds_per_step == pytest.approx(1.0)
    assert shared.seconds_per_step == pytest.approx(100 * (0.01 + 8 * 0.01))
    prompts = changed(learner=LearnerSpeed(0.0), engine=EngineSpeed(0.01, 0.0, 0.002), prompt=Distribution(50))
    assert predict(prompts, steps=8, settle=2).seconds_per_step == pytest.approx(1.1)


def test_a_learner_that_waits_for_the_engines_is_slower_by_the_pause() -> None:
    weights = LearnerSpeed(3.0, pause=2.0)
    overlapped = predict(changed(max_staleness=4, learner=weights), steps=40, settle=10)
    waits = predict(changed(max_staleness=4, learner=msgspec.structs.replace(weights, waits=True)), steps=40, settle=10)
    assert overlapped.seconds_per_step == pytest.approx(3.0, rel=0.02)
    assert waits.seconds_per_step == pytest.approx(5.0, rel=0.02)


def test_engines_and_learner_on_the_same_cores_hold_each_other_up() -> None:
    beside = changed(max_staleness=1, learner=LearnerSpeed(3.0), sharing=Sharing(engine=2.0, learner=1.5))
    # Two batches take turns: while one is trained the other is generated, a token of it in 0.02 s instead of 0.01. That takes
    # 2 s, in which the learner does what it does alone in 2 / 1.5.
    made = predict(beside, steps=40, settle=10)
    assert made.seconds_per_step == pytest.approx(2.0 + (3.0 - 2.0 / 1.5), rel=1e-6)
    # On-policy nobody works beside another.
    assert predict(
        msgspec.structs.replace(beside, max_staleness=0), steps=12, settle=2
    ).seconds_per_step == pytest.approx(4.0)


def test_towards_the_end_of_a_run_nothing_more_is_generated() -> None:
    endless = changed(max_staleness=4, learner=LearnerSpeed(3.0))
    ending = predict(endless, steps=12, settle=4, ends=True)
    assert ending.seconds_per_step == pytest.approx(3.0)
    assert ending.engine_idle > predict(endless, steps=12, settle=4).engine_idle + 0.1


@settings(max_examples=60)
@given(
    staleness=st.integers(0, 4),
    window=st.integers(1, 6),
    publication=st.integers(1, 3),
    generators=st.integers(1, 5),
    places=st.integers(1, 8),
    tokens=st.sampled_from([0, 500, 1500]),
    lost=st.sampled_from([0.0, 20.0]),
    seed=st.integers(0, 99),
)
def test_every_run_moves_and_keeps_its_bound_on_age(
    staleness: int, window: int, publication: int, generators: int, places: int, tokens: int, lost: float, seed: int
) -> None:
    model = changed(
        max_staleness=staleness,
        window=window,
        steps_per_publication=publication,
        generators=generators,
        places=places,
        tokens_per_step=tokens,
        lost=lost,
        restart=5.0,
        turns=Distribution(2),
        answer=Distribution(50, 0.8, 400),
        tool=Distribution(0.3, 1.0, 10),
        learner=LearnerSpeed(0.5, 0.0001, 0.05, 0.05, 0.05, 0.1),
    )
    made = predict(model, steps=12, settle=3, seed=seed)
    assert made.max_age <= worst_case_staleness(staleness, window, model.prompts_per_step * publication)
    assert 0 <= made.learner_idle <= 1
    assert 0 <= made.engine_idle <= 1
    assert made == predict(model, steps=12, settle=3, seed=seed)


def test_lost_generators_cost_what_they_were_playing() -> None:
    long = changed(generators=3, max_staleness=2, answer=Distribution(2000), lost=60.0, restart=10.0)
    made = predict(long, steps=60, settle=5)
    assert 0.05 < made.lost_tokens < 0.6
    assert made.seconds_per_step > predict(msgspec.structs.replace(long, lost=0.0), steps=60, settle=5).seconds_per_step
