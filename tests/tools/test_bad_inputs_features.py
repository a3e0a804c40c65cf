"""What people get wrong in settings of sampling, adapters, evaluations, tools, several environments, agents, a teacher and
supervised training: one line that names the setting and the fix, exit code 2, and no run."""

import pytest

from tests.helpers.bad_inputs import judge, make_folder
from tests.helpers.cli import typed

MCP = "env.name=mcp:reverse-text "
PYTHON = 'env.args.servers.a.command=["python"]'

SETTINGS = [
    # sampling
    ("episode.top_p=1.5", "`top_p` must be at most 1"),
    ("episode.top_k=-1", "`top_k` must be 0 or more"),
    ("episode.min_p=2", "`min_p` must be at most 1"),
    ('episode.stop=[""]', "would end every answer"),
    ("episode.stop=x", "it must be a list of texts"),
    ("episode.keep_sampling_mask=maybe", "it must be true or false"),
    ("episode.ignore_eos=1", "it must be true or false"),
    ("episode.template_args=3", "it is a table"),
    # adapters
    ("learner.lora.rank=-1", "`rank` must be 0 or more"),
    ("learner.lora.alpha=0", "`alpha` must be greater than 0"),
    ("learner.lora.targets=[]", "must name matrices"),
    ('learner.lora.targets=[""]', "must name matrices"),
    ("learner.lora.rnak=3", "did you mean `learner.lora.rank`"),
    ("learner.lora.rank=4 learner.backend=scripted", "`lora.rank` needs another backend"),
    # evaluations
    ("evaluation.every_steps=-1", "`every_steps` must be 0 or more"),
    ("evaluation.samples_per_task=0", "`samples_per_task` must be greater than 0"),
    ("evaluation.temperature=-1", "`temperature` must be 0 or more"),
    ("evaluation.temperature=0 evaluation.samples_per_task=4", "4 greedy answers to a task are all the same"),
    ("evaluation.env.args.letters=3", "name the environment that they are for"),
    ("evaluation.every_steps=10 evaluation.env.name=revers-text", "did you mean 'reverse-text'"),
    ("evaluation.sets.a=3", "`evaluation.sets.a` is a section"),
    ("evaluation.sets.a.samples_per_task=0", "[evaluation.sets.a] `samples_per_task` must be greater than 0"),
    ("evaluation.sets.a.temperatur=0", "did you mean `evaluation.sets.a.temperature`"),
    ("evaluation.sets.a/b.samples_per_task=2", "'a/b' is no name"),
    ("checkpoint.keep_best=pass@4", "set `evaluation.every_steps`"),
    ("checkpoint.keep_best=pass@4 evaluation.every_steps=10", "reward_mean, pass@1"),
    # dynamic sampling
    ("schedule.replaced_groups=2", "set `algorithm.filter_zero_variance` = true"),
    ("schedule.replaced_groups=-1", "`replaced_groups` must be 0 or more"),
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
    ("sft.epochs=-1", "`epochs` must be 0 or more"),
]

COMMANDS = [
    ("sft", "Missing argument 'preset'"),
    ("sft quikstart", "did you mean 'quickstart'"),
    ("sft quickstart --steps 3", "Settings have no dashes: steps=3"),
    ("sft quickstart lr=3", "here it is `learner.lr`"),
    ("sft quickstart data=rows.jsonl", "`model.path` is empty"),
    ("sft quickstart model.path=nowhere", "is not a model directory"),
    ("sft quickstart model.path=models/no_template", "add chat_template.jinja"),
    ("train quickstart algorithm.distillation.teacher=nowhere", "is not a model directory"),
    ("report nowhere --serve", "no run 'nowhere'"),
    ("report empty --serve --port 99999", "--port"),
    ("eval nowhere --samples-per-task 4", "it is `evaluation.samples_per_task` here"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    make_folder(folder)
    return folder


@pytest.mark.parametrize(("line", "part"), SETTINGS, ids=[line for line, _ in SETTINGS])
def test_settings_that_cannot_be(line, part, folder):
    judge(typed("train", "quickstart", *line.split(), "--dry-run", cwd=folder), (part,))
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("line", "part"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_line_that_cannot_be(line, part, folder):
    judge(typed(*line.split(), cwd=folder), (part,))
    assert not (folder / "runs").exists()
