"""A new model knows the format of the game and little of the skill."""

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from r3async.actors.process import RunFailed
from r3async.config import ConfigError, load_config
from r3async.envs.builtin import ReverseText
from r3async.rollout.renderer import ChatRenderer
from r3async.tools import init_model as module
from r3async.tools.init_model import build_byte_tokenizer, init_model, init_model_in_process, init_or_copy_model
from r3async.tools.preflight import try_environments
from r3async.world.processes import run_on_shared_loop
from tests.helpers.cli import run_program
from tests.helpers.judge import judge_answers

SMALL = ["model.init.size=tiny", "model.init.warm_reward=0.05", "env.args.turns=2"]


class Own(ReverseText):
    """A built-in environment under another name."""


class NoOracle:
    """An environment that does not know the answer."""

    async def reset(self, task_seed): ...

    async def step(self, action): ...


@pytest.mark.long
def test_a_model_is_made_warmed_up_and_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = []
    made = init_model(tmp_path / "model", load_config("quickstart", SMALL), progress=lines.append)
    assert made["sampled_reward"] >= 0.05
    assert made["warm_steps"] > 0
    assert any("sampled reward" in line for line in lines)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_experts == 8
    assert sum(p.numel() for p in model.parameters()) == made["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("naïve ☃", add_special_tokens=False)) == "naïve ☃"
    assert ChatRenderer.from_model(tmp_path / "model").eos_token_id == tokenizer.eos_token_id
    assert json.loads((tmp_path / "model" / "r3async_init.json").read_text()) == made


def test_equal_seeds_make_equal_models(tmp_path):
    from safetensors.torch import load_file

    config = load_config("quickstart", [*SMALL, "model.init.max_warm_steps=2"])
    for name in ("a", "b"):
        init_model(tmp_path / name, config)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all((first[k] == second[k]).all() for k in first)


def files(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_model_of_the_same_settings_is_a_copy_of_the_one_before_unless_that_was_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []
    monkeypatch.setattr(module, "warm_up_model", lambda *args, real=module.warm_up_model: made.append(1) or real(*args))
    config = load_config("quickstart", [*SMALL, "model.init.max_warm_steps=1"])

    def make(name, config=config):
        init_or_copy_model(tmp_path / name, config)
        return files(tmp_path / name)

    first = make("first")
    assert make("second") == first
    assert len(made) == 1
    (kept,) = (tmp_path / "cache" / "r3async").iterdir()
    weights = kept / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert make("third") == first
    assert len(made) == 2
    assert make("fourth") == first
    assert len(made) == 2
    make("other", load_config("quickstart", [*SMALL, "model.init.max_warm_steps=1", "model.init.seed=1"]))
    assert len(made) == 3


def test_a_cache_that_cannot_be_written_and_an_environment_of_the_persons_own_change_nothing(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = [*SMALL, "model.init.max_warm_steps=1"]
    init_or_copy_model(tmp_path / "model", load_config("quickstart", tiny))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    init_or_copy_model(tmp_path / "own", load_config("quickstart", [*tiny, "env.name=tests.tools.test_init_model:Own"]))
    assert files(tmp_path / "own").keys() == files(tmp_path / "model").keys()
    assert not (tmp_path / "empty").exists()


def test_an_existing_directory_is_not_touched(tmp_path):
    with pytest.raises(FileExistsError):
        init_model(tmp_path, load_config("quickstart"))


def test_an_environment_without_an_oracle_is_refused_with_the_fix(tmp_path):
    config = load_config("quickstart", ["env.name=tests.tools.test_init_model:NoOracle"])
    with pytest.raises(ConfigError, match=r"model\.path"):
        init_model(tmp_path / "model", config)


def test_the_tokenizer_is_one_token_a_byte():
    tokenizer = build_byte_tokenizer()
    assert len(tokenizer.encode("abc é", add_special_tokens=False)) == 6
    assert len(tokenizer) <= 264


@pytest.fixture
def own_children():
    """Processes that the test started itself: other tests of this worker keep theirs."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


@pytest.mark.long
def test_a_model_that_is_made_apart_is_the_same_and_this_process_does_something_else_meanwhile(tmp_path, own_children):
    config = load_config("quickstart", [*SMALL, "model.init.max_warm_steps=1"])
    init_model(tmp_path / "here", config)
    lines, done = [], []
    init_model_in_process(
        tmp_path / "apart", config, lines.append, lambda: done.append(not (tmp_path / "apart").exists())
    )
    assert done == [True]
    assert "loading torch" in lines[0]
    assert files(tmp_path / "apart") == files(tmp_path / "here")
    assert not own_children()


@pytest.mark.long
def test_what_makes_a_model_apart_fail_is_raised_here_and_its_process_is_ended(tmp_path, own_children):
    config = load_config("quickstart", ["env.name=tests.tools.test_init_model:NoOracle"])
    with pytest.raises(ConfigError, match="has no oracle"):
        init_model_in_process(tmp_path / "model", config, print, lambda: None)

    class Stop(BaseException):
        pass

    def stop():
        assert len(own_children()) == 1
        raise Stop

    def kill():
        (process,) = own_children()
        process.kill()

    with pytest.raises(Stop):
        init_model_in_process(tmp_path / "model", load_config("quickstart", SMALL), print, stop)
    with pytest.raises(RuntimeError, match="ended with code -9"):
        init_model_in_process(tmp_path / "model", load_config("quickstart", SMALL), print, kill)
    assert not own_children()
    assert not (tmp_path / "model").exists()


@pytest.mark.long
def test_a_program_without_a_guard_is_not_run_again_by_the_process_that_makes_its_model(tmp_path):
    small = [*SMALL, "model.init.max_warm_steps=1"]
    code = f"""
print("the program")
from pathlib import Path
from r3async.config import load_config
from r3async.tools.init_model import init_model_in_process
init_model_in_process(Path({str(tmp_path / "model")!r}), load_config("quickstart", {small!r}), lambda line: None, lambda: None)
"""
    (tmp_path / "script.py").write_text(code)
    done = run_program([sys.executable, "script.py"], cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert (done.returncode, done.stdout) == (0, "the program\n"), done.stderr[-2000:]
    assert "leaked" not in done.stderr, "what a process leaves behind when it is killed"
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_reward_that_keeps_a_connection_warms_a_model_up_and_the_person_is_told_that_it_is_called(tmp_path):
    """Each look at the reward had an event loop of its own, and the second died: "Event loop is closed"."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "3+3=", "answer": "6"}\n')
    settings = [f"data={tmp_path / 'rows.jsonl'}", "data.eval=0", "reward=tests.helpers.judge:asked"]
    settings += [SMALL[0], "model.path=", "model.init.warm_reward=1.0", "model.init.max_warm_steps=1"]
    lines = []
    with judge_answers() as answers:
        config = load_config("math", settings)
        run_on_shared_loop(try_environments(config))
        init_model(tmp_path / "model", config, progress=lines.append)
        assert len(answers) == 1 + module.WARMUP_BATCH_EPISODES
    assert any("`reward` is called for each" in line for line in lines)


def raising_model(tmp_path, reward, lines):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(100)))
    settings = [f"data={tmp_path / 'rows.jsonl'}", "data.eval=0", f"reward=tests.tools.test_init_model:{reward}"]
    settings += [SMALL[0], "model.path=", "model.init.warm_reward=1.0", "model.init.max_warm_steps=1"]
    init_model(tmp_path / "model", load_config("math", settings), progress=lines.append)


def failing_sometimes(completion, answer):
    if answer in ("7", "33"):
        raise ValueError("my parser broke")
    return 0.5


def failing_always(completion, answer):
    raise ValueError("my parser broke")


def test_a_task_whose_reward_raises_is_left_out_of_the_warm_up_and_the_error_is_printed_once(tmp_path):
    """Training would count it and continue, too."""
    lines = []
    raising_model(tmp_path, "failing_sometimes", lines)
    assert (tmp_path / "model" / "config.json").is_file()
    printed = [line for line in lines if "my parser broke" in line]
    assert len(printed) == 1
    assert "ValueError: my parser broke (test_init_model.py:" in printed[0]


def test_a_reward_that_raises_on_every_task_ends_the_warm_up_with_its_error_in_a_line(tmp_path):
    lines = []
    with pytest.raises(
        RunFailed, match=r"8 tasks in a row failed .* ValueError: my parser broke \(test_init_model.py:"
    ):
        raising_model(tmp_path, "failing_always", lines)
    assert sum("my parser broke" in line for line in lines) == 1
