"""Rows and reward functions in every form that TRL's and verl's documentation shows, without a change.

The bodies are ours; what counts are names, arguments and results. Sources:

* TRL, "GRPO Trainer", section "Using a custom reward function", examples 1 to 6:
  https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
* TRL, "Reward Functions" (`trl.rewards`): https://huggingface.co/docs/trl/rewards
* TRL, "Dataset formats and types", "Prompt-only": https://huggingface.co/docs/trl/dataset_formats#prompt-only
* verl, "Prepare Data for Post-Training": https://verl.readthedocs.io/en/latest/preparation/prepare_data.html
* verl, "Implement Reward Function for Dataset": https://verl.readthedocs.io/en/latest/preparation/reward_function.html
* verl, "Reward Loop", "Rule-Based Reward": https://verl.readthedocs.io/en/latest/advance/reward_loop.html
"""

import pytest

from r3async.config import ConfigError
from r3async.envs import EnvironmentFailed, Message
from tests.helpers.rewards import play_answer, rewarded_rows

OWN = r"""
import asyncio
import re

# TRL, example 1: by tokens. Older pages spell the argument as in the second.
def longer_by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def longer_by_tokens_once(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

# TRL, "the easiest way to comply with this requirement is to use **kwargs"
def everything(**kwargs):
    (ids,), (prompt,), (said,) = kwargs["completion_ids"], kwargs["prompts"], kwargs["completions"]
    assert kwargs["ground_truth"] == ["4"] and prompt == "2+2?" and said == "four"
    return [float(len(ids))]

# TRL, example 1.1: by characters
def longer_by_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]

# TRL, example 2: a format, of conversations
def in_format(completions, **kwargs):
    texts = [messages[0]["content"] for messages in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]

# TRL, example 3: a reference
def boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    return [1.0 if match and match.group(1) == wanted else 0.0 for match, wanted in zip(found, ground_truth)]

# TRL, example 4: several tasks in one dataset
def of_mathematics(prompts, completions, task, **kwargs):
    return [(1.0 if text == "4" else -1.0) if kind == "math" else None for text, kind in zip(completions, task)]

def of_code(prompts, completions, task, **kwargs):
    return [(1.0 if "def" in text else -1.0) if kind == "code" else None for text, kind in zip(completions, task)]

# TRL, example 5: asynchronous
async def not_empty(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if text else 0.0 for text in completions]

# TRL, example 6: more columns and metrics in its logs
def logs(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    rewards = [float(text == wanted) for text, wanted in zip(completions, ground_truth)]
    if log_extra:
        log_extra("wanted", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
        log_metric("length", len(completions[0]))
    return rewards

# TRL, `trl.rewards.accuracy_reward`: the columns of DeepMath and others are called `solution`
def accuracy(completions: list[list[dict[str, str]]], solution: list[str], log_extra=None, **kwargs) -> list[float | None]:
    return [None if not wanted else float(said[0]["content"] == wanted) for said, wanted in zip(completions, solution)]

# TRL, `trl.rewards.get_cosine_scaled_reward`: an object that is called
class Scaled:
    def __init__(self, most):
        self.most = most

    def __call__(self, completions, solution, completion_ids, **kwargs):
        return [len(ids) / self.most for ids in completion_ids]

scaled = Scaled(10)

def of_trainer(completions, trainer_state, **kwargs):
    return [trainer_state.global_step]

# verl, "Customized": the parameters that a function should have
def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100

# verl, `verl/utils/reward_score/gsm8k.py`: some of them, and settings that have defaults
def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    return 0 if not found else score if found[-1].replace(",", "") == ground_truth else format_score

# verl, "Rule-Based Reward": asynchronous, and a table
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    right = solution_str.endswith(ground_truth)
    return {"score": float(right), "acc": right, "by": data_source, "index": extra_info.get("index", -1)}

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}

# verl, "Model-Base Reward": of a reward model that verl serves
async def compute_score_gsm8k(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    return {"score": 0}
"""

ASKED = 'Natalia sold 24 clips. Let\'s think step by step and output the final answer after "####".'
GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": ASKED}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "so\n#### 72", "question": "Natalia sold 24 clips."},
}
"""verl, "Prepare Data for Post-Training": the five fields, as its script for GSM8K fills them."""
OTHER = {"role": "system", "content": "You are a math expert."}
CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    (tmp_path / "documented.py").write_text(OWN)
    with rewarded_rows(tmp_path, monkeypatch) as make:
        yield lambda row, *fns, **options: make(row, [f"documented.py:{fn}" for fn in fns], **options)


@pytest.mark.parametrize(
    ("row", "fn", "text", "reward"),
    [
        ({"prompt": "The sky is"}, "longer_by_tokens", " blue.", 2.0),
        ({"prompt": "The sky is"}, "longer_by_tokens_once", " blue.", 2.0),
        ({"prompt": "2+2?", "ground_truth": "4"}, "everything", "four", 2.0),
        ({"prompt": "The sky is"}, "longer_by_characters", " blue.", 6.0),
        ({"prompt": CHAT}, "in_format", "<think>so</think><answer>4</answer>", 1.0),
        ({"prompt": CHAT}, "in_format", "4", 0.0),
        ({"prompt": "Solve $2x + 3 = 7$.", "ground_truth": "2"}, "boxed", r"It is \boxed{2}.", 1.0),
        ({"prompt": "Solve $2x + 3 = 7$.", "ground_truth": "2"}, "boxed", r"It is \boxed{6}.", 0.0),
        ({"prompt": "2+2?"}, "not_empty", "4", 1.0),
        ({"prompt": CHAT, "solution": "4"}, "accuracy", "4", 1.0),
        ({"prompt": CHAT, "solution": "4"}, "scaled", "4", 0.2),
    ],
)
async def test_rewards_of_trl(dataset, row, fn, text, reward):
    assert await play_answer(dataset(row, fn), text, [5, 6]) == (reward, {f"rewards/{fn}": reward})


async def test_rewards_of_trl_that_are_each_for_one_task(dataset):
    for task, text, reward in (("math", "4", 1.0), ("math", "5", -1.0), ("code", "def f(): ...", 1.0)):
        env = dataset({"prompt": "2+2?", "task": task}, "of_mathematics", "of_code")
        name = {"math": "rewards/of_mathematics", "code": "rewards/of_code"}[task]
        assert await play_answer(env, text) == (reward, {name: reward})
    with pytest.raises(EnvironmentFailed, match="no reward applies"):
        await play_answer(dataset({"prompt": "2+2?", "task": "other"}, "of_mathematics", "of_code"), "4")


async def test_a_reward_of_trl_logs_metrics_of_its_own(dataset):
    env = dataset({"prompt": "2+2?", "ground_truth": "4"}, "logs")
    assert await play_answer(env, "4") == (1.0, {"rewards/logs": 1.0, "accuracy": 1.0, "length": 1.0})
    assert await play_answer(env, "five") == (0.0, {"rewards/logs": 0.0, "accuracy": 0.0, "length": 4.0})


def test_what_only_trls_trainer_has_is_refused_by_name(dataset):
    with pytest.raises(ConfigError, match=r"asks for `trainer_state`, which only TRL's trainer has: give it a default"):
        dataset({"prompt": "2+2?"}, "of_trainer")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "prompt", ["The sky is", CHAT, [OTHER, *CHAT]], ids=["standard", "conversational", "with system"]
)
async def test_prompt_only_rows_of_trl(dataset, prompt, suffix):
    env = dataset({"prompt": prompt}, "not_empty", suffix=suffix)
    wanted = [Message("user", prompt)] if isinstance(prompt, str) else [Message(**message) for message in prompt]
    assert await env.reset(0) == wanted


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("system", [False, True])
async def test_rows_of_verl(dataset, system, suffix):
    """Those of its script with tools begin with a system message, and have nested tables in `extra_info`."""
    tools = {"need_tools_kwargs": True, "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "72"}}}}
    more = {"prompt": [OTHER, *GSM8K["prompt"]], "extra_info": {**GSM8K["extra_info"], **tools}} if system else {}
    env = dataset({**GSM8K, **more}, "compute_score", suffix=suffix)
    assert await env.reset(0) == [Message("system", OTHER["content"])] * system + [Message("user", ASKED)]
    assert env.oracle() == "72"
    assert await play_answer(env, "#### 72") == (1.0, {"rewards/compute_score": 1.0, "acc": 1.0, "index": 0.0})


@pytest.mark.parametrize(
    ("fn", "text", "reward"),
    [
        ("my_reward_fn", "#### 72", 0.07),
        ("gsm8k", "so #### 72", 1.0),
        ("gsm8k", "so #### 7", 0.0),
        ("gsm8k", "72", 0.0),
    ],
)
async def test_rewards_of_verl(dataset, fn, text, reward):
    assert await play_answer(dataset(GSM8K, fn), text) == (reward, {f"rewards/{fn}": reward})


async def test_a_table_of_verl_without_extra_info_or_score(dataset):
    bare = {name: GSM8K[name] for name in ("data_source", "prompt", "reward_model")}
    assert (await play_answer(dataset(bare, "compute_score"), "72"))[1]["index"] == -1.0
    with pytest.raises(EnvironmentFailed, match=r"must return a finite number or None, not 'a table without `score`'"):
        await play_answer(dataset(GSM8K, "no_score"), "72")


def test_a_reward_model_that_verl_serves_is_refused_by_name(dataset):
    with pytest.raises(ConfigError, match="asks for 'reward_router_address'; a reward in verl's form gets data_source"):
        dataset(GSM8K, "compute_score_gsm8k")
