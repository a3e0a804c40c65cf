"""A run as a Ray job: what is packaged, what is refused, and what a person sees when it ends, on a cluster of our own."""

import json
import secrets
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest

from r3async.config import ConfigError, load_config
from r3async.tools.fit import check_cluster_fit, describe_cluster_fit, parse_nodes
from r3async.tools.plan import make_run_plan
from r3async.tools.submit.jobs import ClusterJobs, JobPackage, SubmitError, compute_stop_seconds, make_package
from r3async.tools.submit.launch import extract_command
from r3async.tools.submit.secrets import find_likely_secrets
from tests.helpers.cli import run_program, typed


def cli(*words, cwd, env):
    return run_program([sys.executable, "-m", "r3async", *words], cwd=cwd, **env)


def package(tmp_path, *overrides, preset="quickstart", **kwargs):
    return make_package(load_config(preset, overrides), preset, overrides, directory=tmp_path, **kwargs)


def test_a_job_runs_the_same_command_with_what_outlives_its_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base model").mkdir()
    made = package(tmp_path, "steps=3", "model.path=base model", "env.args={letters = 5}")
    model = f"'model.path={tmp_path}/base model'"
    words = f"'model.path=base model' 'env.args={{letters = 5}}' {model}"
    assert extract_command(made.entrypoint) == f"-m r3async train quickstart steps=3 {words}"
    variables = made.runtime_env["env_vars"]
    assert variables["R3ASYNC_RUNS"] == str(tmp_path / "runs")
    assert (
        int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) == 150 > 4 * load_config("quickstart").supervise.stop_grace_seconds
    )
    assert made.runtime_env["working_dir"] == str(tmp_path)
    assert {"runs/", ".venv/", ".git/", "*.safetensors"} <= set(made.runtime_env["excludes"])


def test_a_longer_grace_is_a_longer_wait_before_the_kill():
    assert compute_stop_seconds(load_config("quickstart", ["supervise.stop_grace_seconds=60"])) == 270


def test_keys_and_passwords_of_the_folder_are_not_packaged(tmp_path, monkeypatch):
    """By Ray's own packing of a folder."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    secret = (
        *(".env", ".env.local", "deploy/.env", "keys/learner.secret", "id_rsa", "keys/id_ed25519", "tls/server.key"),
        *("ca.pem", ".netrc", ".ssh/config", ".aws/credentials", "credentials.json", ".huggingface/token"),
        *("hf_token", "HF_TOKEN.txt", "wandb-token.json", "my_secret.txt", "aws_credentials.csv", "passwords.txt"),
        *("api_key.txt", "OpenAI-API-Key.yaml", "apikey", "kubeconfig", "kubeconfig-prod.yaml", "prod.env", ".envrc"),
        *(".kube/config", ".gcloud/a.db", ".azure/a", "a[1] !b/token #2.txt", "secrets.yaml", "secrets/a.txt"),
    )
    kept = (
        *("mine.toml", "rewards.py", "keys/learner.public", "rows.jsonl", "environment.py", "keys.py"),
        *("secrets_of_rust/a.txt", "tokenizer.py", "tokens.py", "tokenizer.json", "tokenizer_config.json"),
        *("token_rewards.py", "model/tokenizer.model", "model/special_tokens_map.json", "model/added_tokens.json"),
        *("tokenizer/vocab.json", "tokens.jsonl", "train_tokens.parquet", "api_keys.md", "environments.toml"),
    )
    for name in (*secret, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", ["transport.keys=keys"])
    made = make_package(config, "quickstart", ["transport.keys=keys"])
    assert f"transport.keys={tmp_path / 'keys'}" in made.entrypoint
    said = made.describe_likely_secrets()
    for name in secret:
        assert any(name == one or (one.endswith("/") and name.startswith(one)) for one in made.likely_secrets), name
    assert f"and {len(made.likely_secrets) - 20} more" in said
    package = tmp_path / "package.zip"
    packaging.create_package(
        str(tmp_path), package, excludes=[*made.runtime_env["excludes"], "package.zip"], include_gitignore=True
    )
    with zipfile.ZipFile(package) as packed:
        names = {name for name in packed.namelist() if not name.endswith("/")}
    assert names == set(kept)


def test_what_is_left_out_of_a_package_is_said(tmp_path, monkeypatch):
    (tmp_path / "hf_token.txt").write_text("x")
    (tmp_path / "tokenizer.py").write_text("x")
    said = typed("submit", "quickstart", "--dry-run", "--no-check", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    (line,) = [line for line in said.stderr.splitlines() if "not packaged" in line]
    assert "hf_token.txt" in line
    assert "rename it" in line
    assert "tokenizer.py" not in line


def test_likely_secrets_are_found_behind_links_and_links_in_a_circle_end(tmp_path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "one" / "two" / "back").symlink_to(tmp_path)
    (tmp_path / "one" / "token").write_text("x")
    (tmp_path / "linked").symlink_to("one")
    assert {"one/token", "linked/token"} <= set(find_likely_secrets(tmp_path))


def test_a_file_that_our_output_goes_to_is_not_packaged(tmp_path):
    """Its growth would change the package's name between upload and start: such a job never started."""
    code = (
        "from r3async.tools.submit.jobs import make_package; from r3async.config import load_config; import pathlib, sys\n"
        f"made = make_package(load_config('quickstart'), 'quickstart', directory=pathlib.Path({str(tmp_path)!r}))\n"
        "print(made.runtime_env['excludes'])"
    )
    with (tmp_path / "what.i.saw").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, timeout=240, check=True)
    assert "'/what.i.saw'" in (tmp_path / "what.i.saw").read_text()


def test_a_folder_may_have_packages_of_whatever_name_but_ours(tmp_path):
    for name in ("tools", "actors", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    package(tmp_path)
    (tmp_path / "r3async").mkdir()
    (tmp_path / "r3async" / "__init__.py").touch()
    with pytest.raises(ConfigError, match="'r3async', which would hide"):
        package(tmp_path)
    (tmp_path / "r3async" / "api.py").touch()
    package(tmp_path)  # a checkout brings its own


def test_a_configuration_file_must_be_in_the_folder(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    outside = tmp_path / "mine.toml"
    outside.write_text('extends = "quickstart"\n')
    with pytest.raises(ConfigError, match="copy it there"):
        package(folder, preset=str(outside))
    inside = folder / "mine.toml"
    inside.write_text('extends = "quickstart"\n')
    assert extract_command(package(folder, preset=str(inside)).entrypoint) == "-m r3async train mine.toml"


def node(name="a", alive="ALIVE", **total):
    return SimpleNamespace(state=alive, node_name=name, node_ip="10.0.0.1", resources_total=total)


def test_what_can_not_fit_is_refused_with_what_to_change():
    config = load_config("moe_30b_r3")
    plan = make_run_plan(config)
    big = {"CPU": 64, "GPU": 8, "memory": 2**40, "accelerator_type:H100": 1}
    assert check_cluster_fit(plan, config, parse_nodes([node("a", **big), node("b", **big)])).problems == []
    lost = parse_nodes([node("a", **big), node("b", "DEAD", **big)])
    assert any("0 of 8 engines (a: 8 GPUs, 64 CPUs)" in p for p in check_cluster_fit(plan, config, lost).problems)
    small = big | {"GPU": 4}
    spread = check_cluster_fit(plan, config, parse_nodes([node(str(i), **small) for i in range(4)]))
    assert spread.problems == []  # a tensor-parallel group has a host, and the learner has two
    assert spread.layout.rank_hosts() == [*"00001111"]
    narrow = small | {"GPU": 1}
    narrow = check_cluster_fit(plan, config, parse_nodes([node(str(i), **narrow) for i in range(16)]))
    assert "2 tensor-parallel ranks of the learner need 2 GPUs of one host" in narrow.problems[0]
    weak = big | {"accelerator_type:A10G": 1}
    del weak["accelerator_type:H100"]
    assert any(
        "21 GiB (A10G)" in p
        for p in check_cluster_fit(plan, config, parse_nodes([node(**weak), node(**weak)])).problems
    )
    large = load_config("moe_235b_r3")
    problems = check_cluster_fit(make_run_plan(large), large, parse_nodes([node(**small)])).problems
    assert any("64 ranks need 64 GPUs" in p for p in problems)
    bare = check_cluster_fit(plan, config, parse_nodes([node(CPU=64)]))
    assert bare.problems == ["the run needs 16 GPUs, and the cluster has none"]
    assert "does not fit" in describe_cluster_fit(narrow, plan)
    assert "places  0: ranks 0-3 of the learner" in describe_cluster_fit(spread, plan)


# -- a cluster of our own ----------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(token_cluster, monkeypatch):
    for name, value in token_cluster.items():
        monkeypatch.setenv(name, value)
    forget_authentication()
    yield ClusterJobs()
    monkeypatch.undo()
    forget_authentication()


def forget_authentication():
    """Ray reads the mode and the token once a process, and tests before these have started a Ray without."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


class NoAgentYet:
    """A cluster's client whose agent comes up at the third request, or never."""

    def __init__(self, after=2):
        self.asked, self.after = 0, after

    def _do_request(self, *args):
        raise NotImplementedError

    def get_address(self):
        return "http://there"

    def submit_job(self, **job):
        self.asked += 1
        if self.asked <= self.after:
            raise RuntimeError(
                "Request failed with status code 500: No available agent to submit job, please try again later."
            )
        return "job-1"


@pytest.fixture
def jobs_of(monkeypatch):
    """Return the jobs of a cluster with this client of Ray's in place of one that connects."""

    def make(client):
        monkeypatch.setattr("r3async.tools.submit.jobs.open_job_client", lambda address: client)
        return ClusterJobs("there")  # no URL, so nothing has to listen

    return make


def test_a_cluster_that_takes_no_jobs_yet_is_waited_for_and_what_may_be_wrong_is_said(monkeypatch, jobs_of):
    monkeypatch.setattr("r3async.tools.submit.jobs.time.sleep", lambda seconds: None)
    jobs, shown = jobs_of(NoAgentYet()), []
    assert jobs.submit_job(JobPackage("true", {}), print_line=shown.append) == "job-1"
    assert shown == ["the cluster takes no jobs yet: waiting for its dashboard agent"] * 2
    jobs = jobs_of(NoAgentYet(after=10**9))
    monkeypatch.setattr("r3async.tools.submit.jobs.AGENT_SECONDS", 0.01)
    with pytest.raises(SubmitError, match="--dashboard-agent-listen-port"):
        jobs.submit_job(JobPackage("true", {}))


def test_a_job_is_found_by_its_id_or_by_its_runs_name(jobs_of):
    listed = [
        SimpleNamespace(submission_id=name, start_time=start, entrypoint=f"r3async train quickstart {words}")
        for name, start, words in (
            ("b", 2, "name=night"),
            ("a", 1, "name=night"),
            ("night2", 3, "name=b"),
            (None, 9, ""),
        )
    ]
    jobs = jobs_of(SimpleNamespace(list_jobs=lambda: listed, _do_request=lambda *args: None))
    assert [jobs.find_job(word) for word in ("a", "b", "night", "night2", "nobody")] == [
        "a",
        "b",
        "b",
        "night2",
        "nobody",
    ]


def job(tmp_path, entrypoint):
    made = make_package(load_config("quickstart"), "quickstart", directory=tmp_path)
    return JobPackage(entrypoint, made.runtime_env)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_jobs_are_followed_to_their_end_with_their_own_exit_codes(jobs, token_cluster, tmp_path):
    for name in ("seen.txt", "ignored.bin", "also.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("ignored.bin\n")
    (tmp_path / ".rayignore").write_text("also.bin\n")
    shown = []
    good = jobs.submit_job(job(tmp_path, "ls; echo $RAY_JOB_STOP_WAIT_TIME_S; sleep 2; echo last"))
    assert jobs.follow_log(good, shown.append)["status"] == "SUCCEEDED"
    text = "".join(shown)
    assert text.endswith("last\n")
    assert "seen.txt" in text
    assert "150" in text
    assert "ignored.bin" not in text.replace(".gitignore", "")
    assert "also.bin" not in text

    bad = jobs.submit_job(job(tmp_path, "echo name=lost broken; exit 7"), "bad-one")
    shown = cli("submit", "logs", bad, "--follow", cwd=tmp_path, env=token_cluster)
    assert (shown.returncode, "broken" in shown.stdout, "exit code 7" in shown.stderr) == (1, True, True)
    asked = cli("submit", "status", "lost", cwd=tmp_path, env=token_cluster)  # by the name of its run
    assert (asked.returncode, json.loads(asked.stdout)["status"]) == (1, "FAILED")
    with pytest.raises(SubmitError, match="bad-one already exists"):
        jobs.submit_job(job(tmp_path, "true"), "bad-one")
    with pytest.raises(SubmitError, match="nobody does not exist"):
        jobs.get_logs("nobody")
    assert [j["job"] for j in jobs.list_jobs() if j["job"] in (good, bad)] == [good, bad]


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_job_that_is_stopped_has_the_time_to_end_in_order(jobs, tmp_path):
    slow = "trap 'sleep 5; echo saved; exit 0' TERM; echo ready; while true; do sleep 0.2; done"
    running = jobs.submit_job(job(tmp_path, f"bash -c {slow!r}"))
    deadline = time.monotonic() + 90
    while "ready" not in jobs.get_logs(running) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert jobs.stop_job(running)
    assert jobs.wait_ended(running, 60)["status"] == "STOPPED"
    assert "saved" in jobs.get_logs(running)  # Ray by itself kills after 3 s
    assert not jobs.stop_job(running)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_cluster_shows_what_it_has_and_wants_its_token(token_cluster, tmp_path):
    fits = cli("submit", "quickstart", "--dry-run", cwd=tmp_path, env=token_cluster)
    assert (fits.returncode, "2 CPUs" in fits.stderr, "it fits" in fits.stderr) == (0, True, True), fits.stderr
    asked = cli("submit", "moe_30b_r3", "--dry-run", cwd=tmp_path, env=token_cluster)
    assert (asked.returncode, "needs 16 GPUs" in asked.stderr) == (1, True), asked.stderr
    large = cli("submit", "moe_30b_r3", cwd=tmp_path, env=token_cluster)
    assert large.returncode == 2
    assert "needs 16 GPUs, and the cluster has none" in large.stderr
    wrong = tmp_path / "token"
    wrong.write_text(secrets.token_hex(32))
    refused = cli("submit", "quickstart", "--dry-run", "--token-file", str(wrong), cwd=tmp_path, env=token_cluster)
    assert refused.returncode == 2
    assert "wants a token" in refused.stderr
