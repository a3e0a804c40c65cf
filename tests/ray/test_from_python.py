"""`r3async.train` with objects and callbacks: from a script without a guard, and within a running event loop."""

import json
import sys
from pathlib import Path

import pytest

import r3async
from r3async.record.reading import read_json_objects
from tests.helpers.cli import run_program

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("local_ray")]

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "generator": {"engine": "scripted", "engine_args": {"token_seconds": 0.0}},
    "weights": {"probe": False},
    "learner": {"dtype": "float32", "threads": 1},
    "schedule": {"prompts_per_step": 2, "group_size": 2},
    "episode": {"max_new_tokens": 4, "max_prompt_tokens": 64, "max_total_tokens": 128},
    "checkpoint": {"every_steps": 2, "every_minutes": 0},
}
SCRIPT = """
import json, os, sys
import r3async

settings, model, runs = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
heard = []

class Sums:
    "Blocking: it is played in processes of the pool."
    def __init__(self, most=9):
        self.most = most
    def reset(self, task_seed):
        self.seed = task_seed
        return f"{task_seed % self.most}+1="
    def step(self, action):
        return r3async.StepResult(bonus(action.text), done=True, metrics={"pid": os.getpid()})

def bonus(text):
    return (len(text) + hash(text) % 7) / 10

class Listener(r3async.Callback):
    def on_step(self, record):
        heard.append(["step", record.step, record.metrics["env/pid/mean"] != os.getpid()])
    def on_evaluation(self, record):
        heard.append(["evaluation", record.step, sorted(n for n in record.figures if "reward_mean" in n or "pass@" in n)])
    def on_checkpoint(self, record):
        heard.append(["checkpoint", record.step, (record.path / "manifest.json").exists()])
    def on_end(self, record):
        heard.append(["end", record.step, record.error])

run = r3async.train(
    "quickstart", environment=Sums, callbacks=[Listener()], runs=runs, name="sums", steps=4, model={"path": model},
    env={"args": {"most": 5}}, evaluation={"every_steps": 2, "tasks": 3, "at_start": True, "sets": {
        "greedy": {"temperature": 0}, "many": {"samples_per_task": 2}}}, **settings,
)
again = r3async.evaluate(run, environment=Sums, tasks=2)
print(json.dumps({"run": str(run), "heard": heard, "again": [again.sets["many"].episodes, again.sets["greedy"].tasks]}))
"""


@pytest.mark.nightly
def test_a_script_without_a_guard_gives_a_class_of_its_own_and_hears_of_its_run(untrained, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = SETTINGS | {"checkpoint": {"every_steps": 100, "every_minutes": 0, "keep_best": "greedy/reward_mean"}}
    words = (sys.executable, "script.py", json.dumps(settings), untrained, tmp_path / "runs")
    done = run_program(words, cwd=tmp_path, timeout=300, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    heard, run = told["heard"], Path(told["run"])
    assert [each for each in heard if each[0] == "step"] == [["step", step, True] for step in (1, 2, 3, 4)]
    figures = [
        "greedy/pass@1",
        "greedy/reward_mean",
        "many/pass@1",
        "many/pass@2",
        "many/reward_mean",
        "pass@1",
        "reward_mean",
    ]
    evaluated = [each for each in heard if each[0] == "evaluation"]
    assert evaluated
    assert evaluated[-1] == ["evaluation", 4, figures]
    assert [step for _, step, _ in evaluated] == sorted(step for _, step, _ in evaluated)
    written = [each for each in heard if each[0] == "checkpoint"]
    assert written == [["checkpoint", 2, True], ["checkpoint", 4, True]], "what is evaluated has one"
    assert heard[-1] == ["end", 4, None]
    assert told["again"] == [4, 2]
    rows = read_json_objects(run / "evaluation.jsonl")
    kept = [json.loads(path.read_text()) for path in sorted((run / "checkpoints").glob("evaluation-0*.json"))]
    assert [one["step"] for one in kept] == [row["step"] for row in rows]
    assert len(kept[-1]["result"]["sets"]["many"]["rewards"]) == 3
    assert 'name = "object:Sums"' in (run / "config.toml").read_text()


def long(completion, answer):
    return len(completion) / 10


async def test_in_a_running_loop_a_callback_that_raises_ends_the_run_which_resumes_with_its_name(untrained, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))
    settings = SETTINGS | {"model": {"path": str(untrained)}, "data": str(rows), "name": "rows"}
    steps, ends = [], []

    class Ends:
        def on_end(self, record):
            ends.append(type(record.error).__name__)

    def stops(record):
        steps.append(record.step)
        if record.step == 2:
            raise ValueError("enough")

    def train(callback, until):
        both = [callback, Ends()]
        return r3async.train("math", reward=[long, "exact"], callbacks=both, runs=tmp_path, steps=until, **settings)

    message = r"callback stops raised in `on_step` of step 2: ValueError: enough"
    with pytest.raises(r3async.CallbackFailed, match=message) as failed:
        train(stops, 10_000)
    assert "name='rows' resumes it" in str(failed.value)
    assert isinstance(failed.value.__cause__, ValueError)
    assert steps == [1, 2]
    made = read_json_objects(tmp_path / "rows" / "metrics.jsonl")[-1]["step"]
    assert (tmp_path / "rows" / "checkpoints" / f"step-{made:08d}").is_dir(), "it was stopped in order"
    run = train(lambda record: steps.append(record.step), made + 2)
    rewards = read_json_objects(run / "metrics.jsonl")
    assert [row["step"] for row in rewards] == list(range(1, made + 3))
    assert steps[2:] == [made + 1, made + 2]
    assert all(row["rewards/long/mean"] > 0 for row in rewards)
    assert ends == ["CallbackFailed", "NoneType"]
