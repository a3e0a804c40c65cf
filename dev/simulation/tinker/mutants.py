"""Planted defects of the Tinker server, which prove that its simulation finds what it is made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dev.simulation.mutants import PlantedMutant, replace_attribute
from r3async.tinker.futures import ResultFutures
from r3async.tinker.kept_sequences import KeptSequences
from r3async.tinker.protocol import Answer
from r3async.tinker.request_files import RequestFiles, TakenRequest
from r3async.tinker.sampling import FairTurns, ModelSampling
from r3async.tinker.sequencing import RequestSequence
from r3async.tinker.sessions import Sessions
from r3async.tinker.training import ModelTraining, TrainedModel

MUTANTS: dict[str, PlantedMutant] = {}


def plant(owner: Any, method: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return a decorator that registers a mutant, as `register_mutant` does for those of a run."""

    def add_mutant(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        what = " ".join((make.__doc__ or "").split())
        MUTANTS[make.__name__] = PlantedMutant(
            make.__name__, what, lambda: replace_attribute(owner, method, make)
        )
        return make

    return add_mutant


@plant(RequestSequence, "is_known")
def number_is_no_identity(is_known: Any) -> Any:
    """A request that comes again is another one."""
    return lambda self, number: False


@plant(RequestSequence, "pop_ready")
def order_of_arrival(pop_ready: Any) -> Any:
    """Requests are made in the order in which they come."""

    def pop_all(self: RequestSequence, now: float) -> list[int]:
        ready = [*self._waiting]
        self._waiting.clear()
        self.next_number = max([self.next_number - 1, *ready]) + 1
        return ready

    return pop_all


@plant(RequestFiles, "list_numbers")
def waiting_forgotten(list_numbers: Any) -> Any:
    """A restart forgets the requests that were taken and not made."""

    def list_some(self: RequestFiles, kind: Any) -> list[int]:
        return [] if kind is TakenRequest else list_numbers(self, kind)

    return list_some


@plant(RequestFiles, "list_numbers")
def answers_forgotten(list_numbers: Any) -> Any:
    """A restart forgets the answers that were not read."""

    def list_some(self: RequestFiles, kind: Any) -> list[int]:
        return [] if kind is Answer else list_numbers(self, kind)

    return list_some


@plant(ModelTraining, "_restore")
def answered_not_made_again(restore: Any) -> Any:
    """A restored model lacks the requests since its state that were answered."""

    async def restore_unanswered(self: ModelTraining, model: TrainedModel, number: int) -> None:
        answered = model.files.list_numbers(Answer)
        for done in answered:
            if 0 < done < number:
                model.files.remove(done, TakenRequest)
        await restore(self, model, number)

    return restore_unanswered


@plant(ModelTraining, "_restore")
def only_the_state_restored(restore: Any) -> Any:
    """A restored model lacks the requests since its state."""

    async def restore_state(self: ModelTraining, model: TrainedModel, number: int) -> None:
        state = await self._find_state(model)
        await restore(self, model, number if state is None else state.seq_id + 1)

    return restore_state


@plant(ModelTraining, "_save_state_if_due")
def state_with_a_gradient(save: Any) -> Any:
    """A state is saved while there is a gradient, which it does not have."""

    async def save_anyway(self: ModelTraining, model: TrainedModel, *rest: Any) -> None:
        has_gradient, model.has_gradient = model.has_gradient, False
        await save(self, model, *rest)
        model.has_gradient = has_gradient

    return save_anyway


@plant(ModelTraining, "_make")
def part_of_a_call_stays(make: Any) -> Any:
    """A call that failed leaves its part of the gradient."""

    async def keep_model(
        self: ModelTraining, model: TrainedModel, number: int, taken: TakenRequest
    ) -> Any:
        backend: Any = self._parts.backend
        try:
            return await make(self, model, number, taken)
        finally:
            model.is_lost = model.model_id not in backend.models

    return keep_model


@plant(ModelTraining, "_restore")
def version_starts_again(restore: Any) -> Any:
    """A restored model counts its updates from the newest state on."""

    async def restore_weights(self: ModelTraining, model: TrainedModel, number: int) -> None:
        state = await self._find_state(model)
        await restore(self, model, number)
        model.version -= 0 if state is None else state.version

    return restore_weights


@plant(Sessions, "write")
def sessions_forgotten(write: Any) -> Any:
    """Sessions do not survive the server."""
    return lambda self, session: None


@plant(Sessions, "add_sampler")
def snapshots_stay(add_sampler: Any) -> Any:
    """A model's older snapshots stay open."""

    def add_only(self: Sessions, sampler: Any) -> list[Any]:
        self.sessions[sampler.session_id].samplers[sampler.sampler_id] = sampler
        return []

    return add_only


@plant(Sessions, "find_idle")
def idle_sessions_stay(find_idle: Any) -> Any:
    """Sessions that nothing is asked of stay open."""
    return lambda self, now: []


@plant(ModelSampling, "_open")
def lost_snapshot_not_opened(open_snapshot: Any) -> Any:
    """An engine that has lost a snapshot is not given it again."""

    async def open_nothing(self: ModelSampling, snapshot: Any) -> None:
        return None

    return open_nothing


@plant(FairTurns, "take")
def first_come_first_served(take: Any) -> Any:
    """Samples are drawn in the order in which they come, whoever sent them."""

    async def take_together(self: FairTurns, owner: str, size: int) -> None:
        await take(self, "everybody", size)

    return take_together


@plant(KeptSequences, "_read_index")
def kept_sequences_forgotten(read_index: Any) -> Any:
    """A restart forgets the sequences of the server before."""
    return lambda self, path: None


@plant(KeptSequences, "_drop_file")
def kept_without_bound(drop_file: Any) -> Any:
    """The oldest sequences are not removed, whatever the disk that they may take."""

    def move_to_the_end(self: KeptSequences, path: Any) -> None:
        self._max_bytes *= 2

    return move_to_the_end


@plant(ResultFutures, "poll")
def polls_answered_at_once(poll: Any) -> Any:
    """A poll without a result is answered at once."""

    async def poll_now(self: ResultFutures, request_id: str) -> Any:
        self._poll_seconds = 0.01
        return await poll(self, request_id)

    return poll_now
