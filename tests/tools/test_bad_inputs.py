"""What people get wrong in a configuration: one line that names the setting and the fix, exit code 2, and no run."""

import pytest

from tests.helpers.bad_inputs import judge
from tests.helpers.cli import typed

MCP = "env.name=mcp:reverse-text "
PYTHON = 'env.args.servers.a.command=["python3"]'

SETTINGS = [
    # words of other trainers in each form that the answer has; all of them: unit/test_other_words.py and test_docs.py
    ("lr=1e-4", "`learner.lr`"),
    ("kl_coef=0.1", "`algorithm.reference_kl.coef`"),
    ("algorithm.kl_ctrl.kl_coef=0.1", "`algorithm.reference_kl.coef`"),
    ("learner.gradient_accumulation_steps=4", "`learner.max_tokens_per_micro_batch`"),
    ("episode.top_p=0", "must be greater than 0"),
    ("repetition_penalty=1.1", "depends on what was sampled before"),
    ("gpu_memory_utilization=0.5", "`generator.engine_args.gpu_memory_utilization`"),
    ("generator.num_inference_engines=2", "`generator.count`"),
    ("trainer.n_gpus_per_node=8", "`learner.parallel.dp` and `generator.count`"),
    ("output_dir=x", "--runs"),
    # names, types and ranges of each section; numbers that no range has, of all sections: unit/test_config_numbers.py
    ("steps", "key=value"),
    ("=3", "key=value"),
    ("learner..lr=3", "key=value"),
    ("-steps=3", "no dashes"),
    ("stpes=3", "did you mean `steps`"),
    ("learner.wram_steps=3", "`learner.warmup_steps`"),
    ("steps=ten", "`steps` = 'ten': it must be a whole number"),
    ("steps=1.5", "whole number"),
    ("steps=0", "`steps` must be greater than 0"),
    ("seed=-1", "`seed` must be 0 or more"),
    ("name=a/b", "`name` = 'a/b' is a path"),
    ("name=latest", "link to the newest run"),
    ("resume=", '"auto", "none"'),
    ("model=x", "`model` is a section"),
    ("model.init.size=huge", "'small', 'tiny'"),
    ("env.workers=0", "`workers` must be greater than 0"),
    ("episode.temperature=0", "`episode.temperature` must be greater than 0", "`evaluation.temperature` = 0"),
    ("episode.max_total_tokens=100000", "`episode.max_total_tokens`", "`learner.max_tokens_per_micro_batch` = 8192"),
    ("episode.max_prompt_tokens=99999", "`max_prompt_tokens` must be less"),
    ("generator.engine=sglang", "'vllm', 'scripted'"),
    ("generator.engine_args=3", "`generator.engine_args` = 3: it is a table"),
    ("generator.engine_args.dtype=half", "set `generator.dtype`"),
    ("schedule.group_size=1", "`schedule.group_size` to 2 or more"),
    ("schedule.minibatches_per_step=99", "`minibatches_per_step` = 99 is more"),
    ("routing.replay=on", "'rollout', 'learner', 'off'"),
    ("algorithm.advantage=grpoo", "did you mean 'grpo'"),
    ("algorithm.advantage=nowhere:advantage", "cannot be loaded"),
    ("algorithm.advantage=mine:number", "must be a function"),
    ("algorithm.policy_loss=ppoo", "did you mean 'ppo'"),
    ("algorithm.policy_loss=nowhere:loss", "cannot be loaded"),
    ("algorithm.policy_loss=mine:number", "must be a function"),
    ("algorithm.policy_loss=mine:function", "one argument"),
    ("schedule.max_token_age=1.5", "it must be a whole number"),
    ("evaluation.temperature=hot", "it must be a number"),
    ("learner.lr=fast", "`learner.lr` = 'fast': it must be a number"),
    ("learner.lr.high=3", "it must be a number"),
    ("learner.lr_schedule=step", "'constant', 'linear', 'cosine'"),
    ("learner.min_lr_ratio=2", "`min_lr_ratio` must be at most 1"),
    ("learner.betas=0.9", "a list of 2"),
    ("learner.parallel.ep=3", "must divide"),
    ("weights.backend=infiniband", "'nccl'"),
    ("weights.probe=perhaps", "true or false"),
    ("buffer.durability=tape", "'memory', 'disk'"),
    ("supervise.max_failed_fraction=2", "at most 1"),
    ("checkpoint.keep_last=0", "greater than 0"),
    ("log.to=[wandb]", "it must be a list"),
    ('log.to=["neptune"]', "'wandb'"),
    ("serving.port=99999", "at most 65,535"),
    ("serving.host=0.0.0.0", "set `token` to a secret"),
    ("serving.token=abc", "'serving.token=$NAME'"),
    # environments
    ("env.name=revers-text", "did you mean 'reverse-text'"),
    ("env.name=", "no such environment"),
    ("env.name=nowhere:Env", "No module named 'nowhere'"),
    ("env.name=mine:Nothing", "no attribute 'Nothing'"),
    ("env.name=mine:number", "needs `reset(task_seed)` and `step(action)`"),
    ("env.name=mine:NoStep", "needs `reset(task_seed)` and `step(action)`"),
    ("env.name=mine:Mixed", "both `async def` or both plain `def`"),
    ("env.name=mine:Needs", "it takes (path)"),
    ("env.name=syntax:Env", "SyntaxError"),
    ("env.name=raises:Env", "RuntimeError: no licence"),
    ("env.name=dataset:", "set `data` = FILE"),
    ("env.name=gymnasium:", "say which"),
    ("env.name=dataset:nowhere.jsonl", "there is no file"),
    ("env.args.letter=3", "did you mean 'letters'"),
    ("env.args.letters=0", "must be at least 1"),
    # sampling
    ("episode.top_p=1.5", "`top_p` must be at most 1"),
    ("episode.min_p=2", "`min_p` must be at most 1"),
    ('episode.stop=[""]', "would end every answer"),
    ("episode.stop=x", "it must be a list of texts"),
    ("episode.ignore_eos=1", "it must be true or false"),
    ("episode.template_args=3", "it is a table"),
    # adapters
    ("learner.lora.alpha=0", "`alpha` must be greater than 0"),
    ("learner.lora.targets=[]", "must name matrices"),
    ('learner.lora.targets=[""]', "must name matrices"),
    ("learner.lora.rnak=3", "did you mean `learner.lora.rank`"),
    ("learner.lora.rank=4 learner.backend=scripted", "`lora.rank` needs another backend"),
    # evaluations
    ("evaluation.samples_per_task=0", "`samples_per_task` must be greater than 0"),
    ("evaluation.temperature=0 evaluation.samples_per_task=4", "4 greedy answers to a task are all the same"),
    ("evaluation.env.args.letters=3", "name the environment that they are for"),
    ("evaluation.every_steps=10 evaluation.env.name=revers-text", "did you mean 'reverse-text'"),
    ("evaluation.sets=3", "`evaluation.sets` holds sections by name"),
    ("evaluation.sets.a=3", "`evaluation.sets.a` is a section"),
    (
        "evaluation.sets.a.temperature=0 evaluation.sets.a.samples_per_task=3",
        "`sets.a`: `temperature` = 0 is greedy, and 3",
    ),
    ("evaluation.sets.a.samples_per_task=0", "[evaluation.sets.a] `samples_per_task` must be greater than 0"),
    ("evaluation.sets.a.temperatur=0", "did you mean `evaluation.sets.a.temperature`"),
    ("evaluation.sets.a/b.samples_per_task=2", "'a/b' is no name"),
    ("checkpoint.keep_best=pass@4", "set `evaluation.every_steps`"),
    (
        "checkpoint.keep_best=pass@8 evaluation.every_steps=10 evaluation.samples_per_task=4",
        "'pass@8' is no figure of the evaluations: reward_mean, pass@1, pass@2, pass@4",
    ),
    (
        "checkpoint.keep_best=reward_mean evaluation.every_steps=3 schedule.steps_per_publication=2",
        "`evaluation.every_steps` = 3 must be a multiple",
    ),
    # dynamic sampling
    ("schedule.replaced_groups=2", "set `algorithm.filter_zero_variance` = true"),
    # tasks by past reward
    ("schedule.difficulty.target=0.5", "this environment does not know how many it has (`size`)"),
    ("schedule.difficulty.settled_share=0.1 env.name=countdown", "or train rows (data=FILE)"),
    # tools
    (MCP, "`servers`"),
    (f"{MCP}{PYTHON} env.args.calls=0", "`calls` = 0 must be above 0"),
    (f"{MCP}{PYTHON} env.args.call=3", "unknown field `call`"),
    (f"{MCP}{PYTHON} env.args.task.leters=3", "did you mean 'letters'"),
    (f"{MCP}env.args.servers.a.tools=[]", "has a `command` or a `url`"),
    (f"{MCP}{PYTHON} env.args.servers.a.url=http://x", "has a `command` or a `url`"),
    (f"{MCP}{PYTHON} env.args.servers.a.tools=[]", "offers no tool of the server: name some, or leave it out for all"),
    (f'{MCP}env.args.servers.a.command=["no-such"]', "names no program"),
    (f"{MCP}env.args.servers.a.url=x", "must begin with http:// or https://"),
    (f"{MCP}env.args.servers.a.url=http://x env.args.servers.a.headers.A=$B", "`headers` name B"),
    (f"env.name=mcp:revers-text {PYTHON}", "did you mean 'reverse-text'"),
    (f"env.name=mcp: {PYTHON}", "say which"),
    # several environments
    ("env.name=mix", "set [[env]], once for each"),
    ("env.name=mix env.args.a=3", "`env.args.a` is a section"),
    ("env.name=mix env.args.a.name=mix", "a mix cannot be one of several environments"),
    ("env.name=mix env.args.a.name=agent-outside", "an agent cannot be one of several environments"),
    ("env.name=mix env.args.a.name=revers-text", "[env.args.a] `env.name` = 'revers-text'"),
    ("env.name=mix env.args.a.weight=-1", "[env.args.a] `weight` must be greater than 0"),
    ("env.name=mix env.args.a.wieght=2", "did you mean `env.args.a.weight`"),
    ("env.name=mix env.args.a.max_turns=99", "which is the most that any environment of the run may have"),
    # agents
    ("env.name=agent:mine", "must be agent:module:function"),
    ("env.name=agent:mine:nothing", "has no attribute 'nothing'"),
    ("env.name=agent:mine:function", "is called with base_url, api_key, task_seed"),
    ("env.name=agent-command", "must be a list of words"),
    ('env.name=agent-command env.args.command=["no-such"]', "there is no program 'no-such'"),
    ("env.name=agent-outside env.args.a=3", "agent-outside takes none"),
    ("env.name=agent-comand", "did you mean 'agent-command'"),
    # a teacher
    ("algorithm.distillation=true", "`algorithm.distillation` is a section"),
    ("algorithm.distillation.coef=0", "`coef` must be greater than 0"),
    ("algorithm.distillation.teachr=x", "did you mean `algorithm.distillation.teacher`"),
    ("algorithm.distillation.teacher=x learner.backend=scripted", '"scripted" has none'),
    ("algorithm.distillation.teacher=file", "is a file, not a model directory"),
    ("algorithm.distillation.teacher=models/no_weights", "no *.safetensors"),
    ("algorithm.distillation.teacher=models/no_tokenizer", "has no tokenizer"),
    ("algorithm.distillation.teacher=nowhere", "`algorithm.distillation.teacher` = 'nowhere': no config.json there"),
    # supervised training
    ("sft.rows_per_step=0", "`rows_per_step` must be greater than 0"),
]

STARTS = [
    # what vLLM on CPU would start with, and then fail at
    (["generator.engine_args={ enable_expert_parallel = true }"], "`generator.engine_args.enable_expert_parallel`"),
    (
        ["generator.engine_args={ tensor_parallel_size = 4 }"],
        "a multiple of 128, or `generator.engine_args.tensor_parallel_size` = 1",
    ),
    (["env.name=mine:Gym"], "step() must return a StepResult", "`gymnasium:ID`"),
    (["env.name=mine:AsyncGym"], "step() must return a StepResult"),
    (["env.name=mine:Number"], "yours returned float: write StepResult(reward, done=True)"),
    (["env.name=mine:Rewards"], "where one number is expected"),
    (["env.name=mine:WithInfo"], "Gymnasium's (observation, info): return the observation alone"),
    (["model.path=nowhere"], "is not a model directory"),
    (["model.path=file"], "is a file, not a model directory"),
    (["model.path=Qwen/Qwen3-30B-A3B"], "hf download Qwen/Qwen3-30B-A3B"),
    (["model.path=models/no_config"], "no config.json in it"),
    (["model.path=models/bad_config"], "config.json cannot be read"),
    (["model.path=models/no_type"], "no `model_type`"),
    (["model.path=models/no_weights"], "no *.safetensors"),
    (["model.path=models/no_tokenizer"], "no tokenizer"),
    (["model.path=models/bad_tokenizer"], "tokenizer_config.json cannot be read"),
    (["model.path=models/no_template"], "add chat_template.jinja"),
    (["--runs", "file"], "is a file"),
    (["--runs", "file/inside"], "is a file"),
    (["--runs", "/proc/nowhere"], "--runs"),
    (["resume=nowhere"], "there is no such checkpoint"),
    (["transport.host=203.0.113.7"], "no address of this machine"),
    (["serving.enabled=true", "serving.port=7", "generator.count=2"], "serving.port=0"),
    (["cluster.address=127.0.0.1:1"], "nobody answers there"),
    (["weights.backend=nccl"], "weights.backend=auto"),
    (["generator.engine_args.max_num_batched_token=3"], "did you mean 'max_num_batched_tokens'"),
]

FILES = [
    ("quikstart", "did you mean 'quickstart'"),
    ("", "no preset ''"),
    ("lr=3", "comes before settings"),
    ("file", "a file must end in .toml"),
    ("nowhere.toml", "no such file"),
    ("folder.toml", "it is a directory"),
    ("broken.toml", "not valid TOML: Invalid value (at line 1"),
    ("twice.toml", "(at line 2"),
    ("binary.toml", "not valid TOML"),
    ("unreadable.toml", "unreadable.toml cannot be read"),
    ("circle.toml", "goes in a circle"),
    ("number.toml", "`extends` = 3"),
    ("base.toml", "no preset 'nowhere'"),
    ("section.toml", "`learner` is a section"),
    ("other.toml", "`trainer.total_epochs`: here it is `steps`"),
]


@pytest.fixture(autouse=True)
def _no_gpu_and_no_cluster(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "parts"), [(line, parts) for line, *parts in SETTINGS], ids=[row[0] for row in SETTINGS]
)
def test_settings_that_cannot_be(line, parts, folder):
    words = ["--", "quickstart", line] if line.startswith("-") else ["quickstart", *line.split(), "--dry-run"]
    judge(typed("train", *words, cwd=folder), parts)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "parts"), [(words, parts) for words, *parts in STARTS], ids=[" ".join(row[0]) for row in STARTS]
)
def test_a_start_that_cannot_be(words, parts, folder):
    judge(typed("train", "quickstart", *words, cwd=folder), parts)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("name", "part"), FILES, ids=[n for n, _ in FILES])
def test_a_file_that_is_no_configuration(name, part, folder):
    judge(typed("train", name, "--dry-run", cwd=folder), (part,))
