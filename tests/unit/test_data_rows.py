"""Rows of one's own: every source and form that is accepted, and for what is not, one line with the place and the setting."""

import resource
import sys

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.checkpoint.manifest import CheckpointError
from r3async.checkpoint.resume_checks import check_resume_settings
from r3async.config import Config, ConfigError, EnvConfig, EpisodeConfig, config_to_dict, load_config
from r3async.envs import Action, Message
from r3async.envs.dataset import DatasetFactory
from r3async.envs.factory import build_environment_factory
from r3async.envs.row_tasks import fill_template, list_field_names, look_up_field
from r3async.envs.rows import read_rows
from r3async.envs.task_splits import load_part_tasks, load_task_splits, resolve_data_config, select_held_out_rows
from r3async.rollout.evaluation import check_environment, drop_long_prompts
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer
from r3async.tools.rows import add_row_digests
from tests.helpers.rewards import mean_reward, write_rows

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]


def env(path, **args):
    return EnvConfig(name="dataset", args={"path": str(path), **args})


def tasks_of(env):
    return load_part_tasks(resolve_data_config(env))


def prompts(env):
    return [[m.content for m in task.messages] for task in tasks_of(env)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    assert prompts(env(write_rows(tmp_path / f"rows{suffix}", ROWS))) == [[row["prompt"]] for row in ROWS]


def test_a_directory_is_its_files_in_order_or_those_of_a_split(tmp_path):
    write_rows(tmp_path / "b.jsonl", ROWS[:3])
    write_rows(tmp_path / "a.csv", ROWS[3:5])
    (tmp_path / "readme.md").write_text("no rows")
    assert prompts(env(tmp_path)) == [[row["prompt"]] for row in (*ROWS[3:5], *ROWS[:3])]
    write_rows(tmp_path / "train-0.jsonl", ROWS[5:7])
    write_rows(tmp_path / "test.jsonl", ROWS[7:8])
    both = env(tmp_path, eval="test")
    assert prompts(both) == [[row["prompt"]] for row in ROWS[5:7]]
    assert prompts(select_held_out_rows(both)) == [[ROWS[7]["prompt"]]]


@pytest.mark.parametrize(
    ("place", "settings", "message"),
    [
        ("rows.jsonl", {"split": "train[:2]"}, r"is one file and has no split 'train\[:2\]'.*`data.limit`"),
        ("rows.jsonl", {"split": "test"}, r"is one file and has no split 'test'"),
        ("rows.jsonl", {"eval": "test"}, r"is one file and has no split 'test'"),
        ("rows.jsonl", {"subset": "main"}, r"`data.subset` = 'main': .* is not on the hub"),
        ("", {"split": "train[:2]"}, r"no file of .* has the split 'train\[:2\]' in its name; it has rows.jsonl"),
        ("", {"eval": "test"}, r"no file of .* has the split 'test' in its name"),
    ],
)
def test_a_split_that_a_file_or_directory_does_not_have_is_refused(tmp_path, place, settings, message):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match=message):
        prompts(env(tmp_path / place, **settings))


def hub_rows(rows, download_size=1000):
    made = datasets.Dataset.from_list(rows)
    made.info.download_size = download_size
    return made


def test_a_split_and_a_subset_of_the_hub_are_not_those_of_a_file_to_evaluate(monkeypatch, tmp_path):
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: hub_rows([{"prompt": "1+1?", "answer": "2"}]))
    held = write_rows(tmp_path / "held.jsonl", ROWS[:2])
    made = env("some/where", subset="main", split="train[:9]", eval=str(held))
    assert prompts(made) == [["1+1?"]]
    assert prompts(select_held_out_rows(made)) == [[row["prompt"]] for row in ROWS[:2]]


def test_rows_of_the_hub_come_through_datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(tmp_path))
    asked = []

    def load_dataset(path, subset, split):
        asked.append((path, subset, split))
        if path == "some/where":
            raise ConnectionError("Couldn't reach 'some/where' on the Hub (offline)\nmore")
        return hub_rows([{"question": "1+1?", "answer": "so\n#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    made = env("openai/gsm8k", subset="main", prompt="{question} Think.", reward="number", split="test")
    assert prompts(made) == [["1+1? Think."]]
    assert asked == [("openai/gsm8k", "main", "test")]
    remedy = (
        r"Where there is a network: hf download some/where --repo-type dataset --local-dir where, and set `data.path`"
    )
    with pytest.raises(ConfigError, match=rf"Hugging Face hub: Couldn't reach .* \(offline\)\. {remedy}"):
        prompts(env("some/where"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs `datasets`, which is not installed: pip install 'r3async\[data\]'"):
        prompts(env("other/where"))


def _bombs(folder):
    """Files of a few hundred or thousand bytes whose rows take gigabytes, by what makes them so."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    long = pyarrow.array(["x" * 1_000_000]).dictionary_encode()
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5000, pyarrow.int32()), long.dictionary)
    listed = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int32()), long.dictionary)
    one_row = pyarrow.ListArray.from_arrays(pyarrow.array([0, 100_000], pyarrow.int32()), listed)
    tables = {
        "one row of one text again and again": pyarrow.table({"prompt": one_row}),
        "one long text in every row": pyarrow.table({"prompt": column, "answer": ["1"] * 5000}),
        "rows without end": pyarrow.table({"prompt": pyarrow.nulls(3_000_000, pyarrow.string())}),
        "a page that is packed": pyarrow.table({"prompt": ["y" * 100_000_000]}),
    }
    for what, table in tables.items():
        path = folder / f"{what}.parquet"
        parquet.write_table(
            table, path, compression="zstd", use_dictionary=what.startswith("one"), write_statistics=False
        )
        yield path


def test_a_small_file_of_gigabytes_is_refused_before_they_are_made(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in _bombs(tmp_path):
        assert path.stat().st_size < 20_000
        with pytest.raises(ConfigError, match=r"bytes and its rows take \d+ and more"):
            read_rows(resolve_data_config(env(path)), str(path), "train")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB: less than one GiB"


def test_a_small_download_of_gigabytes_is_refused_before_they_are_rows(monkeypatch, tmp_path):
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(tmp_path))
    packed = hub_rows([{"prompt": "x" * 2**20, "answer": "1"}] * 80, download_size=300)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: packed)
    with pytest.raises(ConfigError, match=r"some/where has 300 bytes and its rows take \d+ and more"):
        prompts(env("some/where"))
    packed.info.download_size = 80 * 2**20
    assert len(prompts(env("some/where"))) == 80


def test_prompts_are_texts_messages_or_templates(tmp_path):
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": None}], "answer": 1}
    row |= {"question": "q", "extra": {"level": 3, "deep": {"x": "y"}}, "a.b": "dotted"}
    path = write_rows(tmp_path / "rows.jsonl", [row])

    def messages(**args):
        return tasks_of(env(path, **args))[0]

    assert messages().messages == [Message("system", "s"), Message("user", "u")]
    assert messages().is_chat
    assert messages(prompt="question").messages == [Message("user", "q")]
    assert not messages(prompt="question").is_chat
    asked = messages(prompt=r"{question} {extra.level} {extra.deep.x} {a.b} \boxed{} {{q}}", system="be brief")
    assert asked.messages == [Message("system", "be brief"), Message("user", r"q 3 y dotted \boxed{} {q}")]
    assert asked.is_chat
    assert messages(prompt=[{"role": "user", "content": "Q: {question}"}]).messages == [Message("user", "Q: q")]
    assert messages(answer="extra.deep.x").answer == "y"


names = st.text("abc", min_size=1, max_size=3)
nested = st.recursive(
    st.text(max_size=5) | st.integers(), lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(names, nested, max_size=4))
def test_every_dotted_name_of_a_row_is_found_and_filled_in(row):
    for name in list_field_names(row):
        value = look_up_field(row, name)
        keys, here = name.split("."), row
        for key in keys:
            here = here[key]
        assert value == here
        if not isinstance(value, dict):
            assert fill_template(f"<{{{name}}}>{{{{{name}}}}}", row, "here") == f"<{value}>{{{name}}}"


@given(st.text())
def test_a_text_without_names_is_no_template_but_for_double_braces(text):
    plain = text.replace("{", "").replace("}", "")
    assert fill_template(plain, {}, "here") == plain
    assert fill_template(text.replace("{", "{{").replace("}", "}}"), {}, "here") == text


@given(st.permutations(range(30)), st.sampled_from([0.1, 0.5, 3, 29]))
def test_the_parts_are_disjoint_and_do_not_depend_on_the_order(tmp_path_factory, order, share):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, [{"prompt": f"p{i % 25}", "answer": str(i)} for i in order])
    if share >= 25:
        with pytest.raises(ConfigError, match="leaves no row to train: there are 25 different prompts"):
            prompts(env(path, eval=share))
        return
    made = env(path, eval=share)
    trained, evaluated = ({p for (p,) in prompts(part)} for part in (made, select_held_out_rows(made)))
    assert not trained & evaluated
    assert trained | evaluated == {f"p{i}" for i in range(25)}
    assert len(evaluated) == (share if share >= 1 else round(share * 25))
    write_rows(path, [{"prompt": f"p{i}", "answer": "0"} for i in range(25)])
    assert {p for (p,) in prompts(select_held_out_rows(made))} == evaluated


def test_rows_that_evaluation_poses_are_left_out_of_training_and_counted(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "eval.jsonl", ROWS[:4])
    made = env(tmp_path / "rows.jsonl", eval=str(tmp_path / "eval.jsonl"))
    assert prompts(made) == [[row["prompt"]] for row in ROWS[4:]]
    assert load_task_splits(resolve_data_config(made)).dropped_overlap == 4
    check_environment(load_config("quickstart", {"evaluation.every_steps": 2, "data": made.args, "reward": "exact"}))
    with pytest.raises(ConfigError, match="leaves no row to train, of 4"):
        prompts(env(tmp_path / "eval.jsonl", eval=str(tmp_path / "rows.jsonl")))


def test_a_limit_takes_the_first_rows(tmp_path):
    assert prompts(env(write_rows(tmp_path / "rows.jsonl", ROWS), limit=3)) == [[row["prompt"]] for row in ROWS[:3]]


def test_long_prompts_are_dropped_and_all_of_them_are_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [*ROWS[:5], {"prompt": "x" * 100, "answer": "y"}])
    chat = ChatRenderer(build_byte_tokenizer())
    factory = DatasetFactory(env(path))
    assert drop_long_prompts(factory, chat, EpisodeConfig(max_prompt_tokens=64)) == 1
    assert factory.size == factory().size == 5
    with pytest.raises(
        ConfigError, match=r"all 5 prompts are longer than `episode.max_prompt_tokens` = 2; the shortest has"
    ):
        drop_long_prompts(factory, chat, EpisodeConfig(max_prompt_tokens=2))


def test_a_run_notes_its_rows_says_how_many_and_cannot_resume_with_others(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "x" * 600, "answer": "y"}])
    config = load_config("math", {"data": str(path), "reward": "exact"})
    said = []
    noted = add_row_digests(config, said.append)
    assert said == [
        "data: 19 rows are trained, 1 dropped (1 longer than episode.max_prompt_tokens = 512)",
        "data: 1 rows are evaluated, 0 dropped",
    ]
    assert check_resume_settings(config_to_dict(noted), add_row_digests(config, said.append)) == {}
    write_rows(path, ROWS[1:])
    with pytest.raises(CheckpointError, match=r"the rows of `data` = '.*rows.jsonl'.*have changed since the run began"):
        check_resume_settings(config_to_dict(noted), add_row_digests(config, said.append))
    with pytest.raises(ConfigError, match="the rows are not those that the run began with"):
        DatasetFactory(noted.env)
    assert add_row_digests(Config(), said.append) == Config()


async def test_a_seed_chooses_a_row_and_its_answer_pays(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    make = build_environment_factory(EnvConfig(name=f"dataset:{path}"))
    assert await mean_reward(make, "oracle", 50) == 1.0
    prompts = {seed: (await make().reset(seed))[0].content for seed in range(60)}
    assert prompts == {seed: (await make().reset(seed))[0].content for seed in range(60)}
    assert len(set(prompts.values())) > 10
    env = make()
    await env.reset(1)
    result = await env.step(Action("no"))
    assert (result.reward, result.done) == (0.0, True)
    with pytest.raises(ConfigError, match=r"`env\.args\.path`"):
        build_environment_factory(EnvConfig(name=f"dataset:{path}", args={"path": "elsewhere"}))


async def test_episodes_that_play_at_once_do_not_share_their_row(tmp_path):
    make = DatasetFactory(env(write_rows(tmp_path / "rows.jsonl", ROWS)))
    one, two = make(), make()
    first = await one.reset(1)
    seed = 2
    while await two.reset(seed) == first:
        seed += 1
    assert (await one.step(Action(str(int(first[0].content[:-3]) + 1)))).reward == 1.0


@pytest.mark.parametrize(
    ("reward", "answer", "want", "paid"),
    [
        ("exact", " yes ", "yes", 1.0),
        ("exact", "yes!", "yes", 0.0),
        ("exact", " 6\n", 6, 1.0),
        ("contains", "oh yes!", "yes", 1.0),
        ("contains", "no", "yes", 0.0),
        ("number", "3 and 4 make 1,007.0.", "1007", 1.0),
        ("number", "1007 or 8", "1007", 0.0),
        ("number", "-2", 2, 0.0),
        ("number", "none", 2, 0.0),
    ],
)
async def test_the_built_in_rewards(tmp_path, reward, answer, want, paid):
    task = DatasetFactory(env(write_rows(tmp_path / "rows.jsonl", [{"prompt": "?", "answer": want}]), reward=reward))()
    await task.reset(1)
    assert (await task.step(Action(answer))).reward == paid


def test_data_and_reward_are_short_for_an_environment(tmp_path):
    config = load_config("quickstart", ["data=a.jsonl", "data.eval=0.1", "reward=rewards:correct"])
    args = {"path": "a.jsonl", "eval": 0.1, "reward": "rewards:correct"}
    assert (config.env.name, config.env.args) == ("dataset", args)
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "math"\n[data]\npath = "b.jsonl"\nprompt = "{q}"\n[[reward]]\nfn = "exact"\nweight = 2\n'
    )
    config = load_config(str(file), ["data=c.jsonl"])
    reward = [{"fn": "exact", "weight": 2}]
    assert config.env.args == {"path": "c.jsonl", "prompt": "{q}", "eval": 0.05, "reward": reward}
    assert load_config(str(file), ["env.name=guess"]).env.args == {}


@pytest.mark.parametrize("overrides", [["reward=null", "data.system=null"], {"reward": None, "data.system": None}])
def test_null_and_none_unset_what_a_file_sets(tmp_path, overrides):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "math"\nreward = "number"\ndata = { path = "b.jsonl", system = "S" }\n')
    data = resolve_data_config(load_config(str(file), overrides).env)
    assert (data.path, data.reward, data.system) == ("b.jsonl", "exact", "")


def test_a_file_names_rows_or_another_environment(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "math"\ndata = "b.jsonl"\n[env]\nname = "guess"\n')
    with pytest.raises(ConfigError, match=r"`data` is for rows, and `env.name` = 'guess' is another environment"):
        load_config(str(file))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=3"], "`data` = 3 must be a path"),
        (["data.reward=exact"], "`reward` is set beside `data`"),
        (["data.promt=q"], "unknown key `data.promt`: did you mean `data.prompt`"),
        (["dta=x"], "did you mean `data`"),
        (["data.limit=-1"], r"\[data\] `limit` must be 0 or more"),
        (["data.eval=-1"], r"\[data\] `eval` must be 0 or more"),
        (["data.eval=1.5"], r"`eval` = 1.5: a share below 1, or a whole number of rows"),
        (["data.limit=many"], "`data.limit` = 'many'"),
        (["reward.fn=exact"], "unknown key `reward.fn`: `reward` is no section"),
        (["data=null"], "`data` cannot be unset: set `env.name`"),
        ({"data": None}, "`data` cannot be unset"),
        ({"data": [1, 2]}, r"`data` = \[1, 2\] must be a path, .* in Python rows: a list of dicts"),
        (["data=x.jsonl", "env.name=guess"], "`data` is for rows, and `env.name` = 'guess' is another environment"),
        (["env.name=guess", "reward=exact"], "`reward` is for rows, and `env.name` = 'guess'"),
        ({"data": "x.jsonl", "env.name": "guess"}, "`data` is for rows, and `env.name` = 'guess'"),
        (["data=x.jsonl", "env=[{name='guess'}]"], r"`data` beside \[\[env\]\]"),
    ],
)
def test_settings_that_cannot_be_are_named_as_they_are_written(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("math", overrides)


BAD_LINES = {
    "not JSON": ('{"prompt": "a", "answer": "b"}\n{"prompt"', r"a.jsonl, line 2: not JSON"),
    "no object": ('{"prompt": "a", "answer": "b"}\n\n[1]\n', r"a.jsonl, line 3: a row must be an object"),
    "blank": ("\n\n", r"a.jsonl has no rows"),
    "binary": (b"\xff\xfe", r"a.jsonl is not UTF-8 text"),
    "open brackets": ("[" * 5000, r"a.jsonl, line 1: not JSON: more than 128 lists"),
    "digits": ('{"prompt": "a", "answer": ' + "1" * 5000 + "}", r"a.jsonl, line 1: not JSON: Exceeds the limit"),
    "half of a pair": ('{"prompt": "\\ud800", "answer": "b"}', r"a.jsonl, line 1: not JSON: .*surrogates"),
    "no prompt": ('{"problem": "a", "answer": "b"}', r"line 1: no field 'prompt'.*`data.prompt`"),
    "null prompt": ('{"prompt": null, "answer": "b"}', r"line 1: no field 'prompt'"),
    "empty prompt": ('{"prompt": " ", "answer": "b"}', r"line 1: the prompt is empty"),
    "number": ('{"prompt": 3, "answer": "b"}', r"field 'prompt' must be a text or chat messages, not 3"),
    "no messages": ('{"prompt": [], "answer": "b"}', r"line 1: the prompt has no messages"),
    "message": ('{"prompt": [{"role": "user"}], "answer": "b"}', r"a chat message must have role and content"),
    "parts": (
        '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "b"}',
        r"line 1: the content of a message must be text, or blocks of text, not .*image",
    ),
    "answered": (
        '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "b"}',
        r"ends with an answer of the assistant",
    ),
    "no answer": (
        '{"prompt": "a"}',
        r"line 1: no answer, which reward 'exact' asks for; its fields: prompt\. .*`data\.answer`",
    ),
    "list answer": (
        '{"prompt": "a", "answer": [1]}',
        r"line 1: the answer must be a text or a number for `exact`, not \[1\]",
    ),
}
BAD_FILES = {
    "open brackets at once": ("a.json", "[" * 5000, r"a.json: not JSON: more than 128 lists"),
    "JSON of lines": ("a.json", '{"a": 1}\n{"a": 2}', r"a.json: not JSON: Extra data.*must end in .jsonl"),
    "JSON object": ("a.json", '{"a": 1}', r"a.json must be a list of rows"),
    "JSON row": ("a.json", '[{"prompt": "a", "answer": "b"}, 3]', r"a.json, row 2: a row must be an object"),
    "short CSV row": ("a.csv", "prompt,answer\na,b\nc\n", r"a.csv, line 3: not the 2 values"),
    "long CSV row": ("a.csv", "prompt,answer\na,b,c\n", r"a.csv, line 2: not the 2 values"),
    "open quote": ("a.csv", 'prompt,answer\n"a,b\n', r"a.csv, line 1: not CSV"),
    "no parquet": ("a.parquet", "prompt", r"a.parquet is no parquet file"),
    "suffix": ("a.txt", "x", r"a.txt does not end in one of .jsonl, .json, .csv, .parquet"),
}
BAD = {what: ("a.jsonl", *bad) for what, bad in BAD_LINES.items()} | BAD_FILES


@pytest.mark.parametrize("what", BAD)
def test_a_row_that_does_not_fit_is_one_line_with_its_place(tmp_path, what):
    name, content, message = BAD[what]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as raised:
        DatasetFactory(env(tmp_path / name))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "none.jsonl"}, r"`data.path` = 'none.jsonl': there is no file {folder}/none.jsonl"),
        ({"path": "rows"}, r"there is no file .*/rows; did you mean 'rows.jsonl'"),
        ({"path": ""}, r"`data` names no rows: set `data` = FILE"),
        ({"path": "."}, r"has no file that ends in .jsonl"),
        ({"path": "rows.jsonl", "prompt": "{prompt} {leve}"}, r"line 1: no field 'leve'; .*`data.prompt`"),
        ({"path": "rows.jsonl", "prompt": "{list}"}, r"line 1: field 'list' must be a text or a number, not \[1\]"),
        ({"path": "rows.jsonl", "promt": "q"}, r"unknown key `data\.promt`: did you mean `data\.prompt`"),
        ({"path": "rows.jsonl", "reward": "number"}, r"line 1: `number` finds no number in the answer 'b'"),
        ({"path": "rows.jsonl", "reward": "exakt"}, "did you mean 'exact'"),
        (
            {"path": "rows.jsonl", "reward": "tests.helpers.envs:three_arguments"},
            r"no field 'difficulty', which reward 'three_arguments' asks for",
        ),
        ({"path": "rows.jsonl", "answer": "info.answr"}, r"did you mean 'info.answer'\? .*`data.answer`"),
        ({"path": "chat.jsonl", "system": "s"}, r"line 1: the prompt has a system message of its own"),
        ({"path": "rows.jsonl", "eval": 0.5}, r"leaves no row to train: there are 1 different prompts"),
    ],
)
def test_a_setting_that_does_not_fit_the_rows_is_named(tmp_path, monkeypatch, args, message):
    folder = tmp_path / "empty" if args["path"] == "." else tmp_path
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(folder))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b", "list": [1], "info": {"answer": "c"}}])
    write_rows(tmp_path / "chat.jsonl", [{"prompt": [{"role": "system", "content": "x"}], "answer": "b"}])
    with pytest.raises(ConfigError, match=message.replace("{folder}", str(folder))) as raised:
        DatasetFactory(EnvConfig(name="dataset", args=args))
    assert "\n" not in str(raised.value)


def test_rows_of_verl_and_of_trl_are_taken_as_they_are_from_parquet(tmp_path):
    asked = [{"role": "user", "content": "1+1?"}]
    verl = {"data_source": "openai/gsm8k", "prompt": asked, "ability": "math"}
    verl |= {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 7, "answer": "so #### 2"}}
    for row in (verl, {"prompt": asked, "solution": "2"}, {"prompt": asked, "ground_truth": "2", "level": 5}):
        (task,) = tasks_of(env(write_rows(tmp_path / "rows.parquet", [row]), reward="number"))
        assert (task.messages, task.is_chat, task.answer, task.row) == ([Message("user", "1+1?")], True, "2", row)
