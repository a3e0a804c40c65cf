"""Callbacks: what is called, in which order, and what one that raises comes to."""

import pytest

from r3async.config import Config, ConfigError
from r3async.tools.callbacks import Callback, CallbackFailed, CallbackRunner


class Listener(Callback):
    def __init__(self, raises=""):
        self.heard, self._raises = [], raises

    def _hear(self, record, what):
        self.heard.append((what, record.step))
        if what == self._raises:
            raise ValueError("enough")

    def on_step(self, record):
        self._hear(record, "step")

    def on_evaluation(self, record):
        self._hear(record, f"evaluation {record.figures['reward_mean']}")

    def on_checkpoint(self, record):
        assert record.path.is_dir()
        self._hear(record, "checkpoint")

    def on_end(self, record):
        self._hear(record, f"end {type(record.error).__name__}")


def status(*steps, evaluated=()):
    evaluations = [{"step": step, "time": float(step + 1), "evaluation/reward_mean": 0.5} for step in evaluated]
    return {"rows": [{"step": step, "reward/mean": 0.1} for step in steps], "evaluations": evaluations}


def begun(run, *given, step=0):
    callbacks = CallbackRunner(given)
    callbacks.begin_run(Config(), run, step)
    return callbacks


def checkpoint(run, step):
    (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_each_thing_is_heard_of_once_in_order(tmp_path):
    checkpoint(tmp_path, 4)
    listener, plain = Listener(), []
    callbacks = begun(tmp_path, listener, lambda record: plain.append(record.metrics["reward/mean"]), step=4)
    callbacks.show_status(status(3, 4, 5))
    callbacks.show_status(status(5, 6, evaluated=[4]))
    checkpoint(tmp_path, 6)
    callbacks.show_status(status(evaluated=[4, 6]))
    assert listener.heard == [("step", 5), ("step", 6), ("evaluation 0.5", 4), ("evaluation 0.5", 6), ("checkpoint", 6)]
    assert plain == [0.1, 0.1]
    callbacks.rewind_to_step(4)  # the run restarts from the checkpoint of step 4
    callbacks.show_status(status(5))
    callbacks.end_run(None)
    assert listener.heard[5:] == [("step", 5), ("checkpoint", 6), ("end NoneType", 5)]


@pytest.mark.parametrize("raises", ["step", "evaluation 0.5", "checkpoint", "end NoneType"])
def test_one_that_raises_is_the_last_that_is_called_and_is_named(tmp_path, raises):
    first, second = Listener(raises), Listener()
    callbacks = begun(tmp_path, first, second)
    assert callbacks.failure is None
    checkpoint(tmp_path, 1)
    callbacks.show_status(status(1, evaluated=[0]))
    callbacks.show_status(status(2))
    message = rf"the callback Listener raised in `on_\w+` of step \d: ValueError: enough.*{tmp_path.name}"
    with pytest.raises(CallbackFailed, match=message):
        callbacks.end_run(None)
    heard = [what for what, _ in first.heard]
    assert heard[-1].startswith("end")
    assert heard.count(raises) == 1
    if not raises.startswith("end"):
        assert heard[-2] == raises
        assert raises not in [what for what, _ in second.heard]
        assert second.heard[-1] == ("end CallbackFailed", 2), "the step that was made meanwhile"


def test_the_runs_own_failure_is_what_is_raised_and_a_run_that_never_began_has_no_end(tmp_path):
    listener, error = Listener("end RuntimeError"), RuntimeError("no GPU")
    begun(tmp_path, listener).end_run(error)
    assert listener.heard == [("end RuntimeError", 0)]
    never = Listener()
    CallbackRunner([never]).end_run(error)
    assert never.heard == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Listener, r"`callbacks\[0\]` is the class Listener: give an instance"),
        (3, r"`callbacks\[0\]` = 3 hears of nothing"),
        (
            type("Misspelt", (Callback,), {"on_steps": print})(),
            r"`callbacks\[0\]` has `on_steps`, which nothing calls: did you mean 'on_step'\?",
        ),
    ],
)
def test_what_is_no_callback_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        CallbackRunner([given])
