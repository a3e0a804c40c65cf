"""The launcher as the README writes it: `.venv/bin/ray start` and `.venv/bin/r3async submit`, and no activated environment."""

import re
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from r3async.config import load_config
from r3async.tools.fit import check_cluster_fit
from r3async.tools.memory import GIB
from r3async.tools.plan import make_run_plan
from r3async.tools.submit.launch import NOT_FOUND_EXIT_CODE, extract_command, make_entrypoint
from r3async.world import ClusterNode
from tests.helpers.cli import run_program
from tests.helpers.cluster import BARE, bare_environment, beside_python, clean_home, free_ports, head_of

ROOT = Path(__file__).parents[2]
AGENT_PORT = 52365  # Ray's default for the agent that takes jobs
SMALL = [
    *("steps=1", "generator.engine=scripted", "weights.probe=false", "learner.threads=1"),
    *("schedule.prompts_per_step=2", "schedule.group_size=2"),
]
MAKES_ITS_MODEL = [*SMALL, "model.init.max_warm_steps=2", "model.init.warm_reward=0"]


def small(model):
    """A run that makes no model, and whose learner has none either."""
    return [*SMALL, "learner.backend=scripted", f"model.path={model}"]


def run(words, cwd, environment, timeout=280):
    return run_program(words, cwd=cwd, timeout=timeout, environment=bare_environment(**environment))


def shell(line, cwd, ray="", **environment):
    """Run a job's line as Ray's supervisor does, below a process with the raylet's argument if `ray` names an interpreter."""
    code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1], shell=True).returncode)"
    options = [f"--python_worker_command={ray} {cwd}/setup_worker.py --node"] if ray else []
    return run([sys.executable, "-c", code, line, *options], cwd, environment, timeout=240)


def python(path, body):
    """An executable that stands for an interpreter without r3async, or with one of its own."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_job_prefers_the_python_of_the_clusters_ray_and_keeps_words_and_exit_codes(tmp_path):
    show = "import sys; print(sys.argv[1:]); sys.exit(7)"
    words = ["-c", show, "name=a b", "x='$HOME'"]
    mine = python(tmp_path / "python-of-ray", f'echo "by ray"; exec {sys.executable} "$@"')
    done = shell(make_entrypoint(words, needs="import r3async.tools.cli"), tmp_path, ray=f'"{mine}"')
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["by ray", str(words[2:])]


@pytest.mark.parametrize("ray", ["/nowhere/python", "bare", ""])
def test_a_job_takes_the_submitters_python_where_that_of_ray_lacks_r3async(tmp_path, ray):
    if ray == "bare":
        ray = python(tmp_path / "bare", "echo \"ModuleNotFoundError: No module named 'tools'\" >&2; exit 1")
    done = shell(
        make_entrypoint(["-c", "import sys; print(sys.executable)"], needs="import r3async.tools.cli"),
        tmp_path,
        ray=ray,
    )
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable), done.stderr


def test_a_job_that_finds_no_python_says_what_it_looked_for(tmp_path):
    bare = python(
        tmp_path / "bare", "echo Traceback; echo \"ModuleNotFoundError: No module named 'tools'\" >&2; exit 1"
    )
    line = make_entrypoint(["-m", "r3async"], needs="import no_such_module", submitter="/missing/.venv/bin/python")
    done = shell(line, tmp_path, ray=str(bare))
    assert done.returncode == NOT_FOUND_EXIT_CODE
    assert f"{bare}: ModuleNotFoundError: No module named 'tools'" in done.stderr
    assert "/missing/.venv/bin/python: there is no such file" in done.stderr
    assert f"PATH={BARE}" in done.stderr
    assert "needs r3async installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_jobs_command_is_shown_without_the_search_before_it():
    assert extract_command(make_entrypoint(["-m", "r3async", "train", "quickstart", "name=a b"])) == (
        "-m r3async train quickstart 'name=a b'"
    )
    assert extract_command("r3async train quickstart") == "r3async train quickstart"


@pytest.mark.ray
@pytest.mark.timeout(500)
def test_the_readmes_submit_works_after_a_local_run_for_a_person_who_has_set_nothing(untrained, tmp_path):
    """Nor activated anything. Ray keeps a token of the local run, and asks for it from then on."""
    r3async = beside_python("r3async")
    for name in ("tools", "actors", "configs"):  # a user's own packages of our folders' names
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the user's own')\n")
    with clean_home() as environment:

        def command(*words, **more):
            return run_program([r3async, *words], cwd=tmp_path, timeout=280, environment=environment, **more)

        local = command("train", "quickstart", "name=local", *small(untrained))
        assert local.returncode == 0, local.stdout + local.stderr
        assert Path(environment["HOME"], ".ray", "auth_token").is_file()
        with head_of(environment) as address:
            submitted = command("submit", "quickstart", "name=job", *MAKES_ITS_MODEL, "--address", address)
            assert submitted.returncode == 0, submitted.stdout + submitted.stderr
            assert (tmp_path / "runs" / "job" / "model" / "config.json").is_file()
            listed = command("submit", "list", "--address", address)
            assert (listed.returncode, "name=job" in listed.stdout) == (0, True), listed.stdout + listed.stderr
            watched = command("tail", "job", "--address", address)
            assert watched.returncode == 0, watched.stdout + watched.stderr
            assert "job: finished after 1 steps" in watched.stdout
            fits = command("submit", "quickstart", "--dry-run", "--address", address)
            assert (fits.returncode, "it fits" in fits.stderr) == (0, True), fits.stdout + fits.stderr
            refused = command("submit", "list", "--address", address, RAY_AUTH_MODE="disabled")
            assert (refused.returncode, "wants a token" in refused.stderr) == (2, True), "what a person says counts"


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_rays_own_command_as_the_page_writes_it_trains(token_cluster, untrained, tmp_path):
    text = (ROOT / "docs" / "scaling.md").read_text()
    (block,) = re.findall(r"^```sh\n(\S*ray job submit .*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    line = block.replace("http://HEAD:8265", token_cluster["RAY_API_SERVER_ADDRESS"]).replace("/shared", str(tmp_path))
    done = run(
        ["sh", "-c", f".venv/bin/{line.strip()} name=plain {shlex.join(small(untrained))}"], tmp_path, token_cluster
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "plain" / "model" / "config.json").is_file()


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_the_slurm_script_makes_a_cluster_trains_and_leaves_nothing_behind(untrained, tmp_path):
    """One node: no `srun`. The cluster has a token of its own, and as many CPUs as the machine; another Ray of this host has
    the usual port of the agent that takes jobs, or something else has it already."""
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    port, dashboard = free_ports(2)
    ports = {"RAY_PORT": str(port), "RAY_DASHBOARD_PORT": str(dashboard), "NODES_WAIT_S": "120"}
    script = ROOT / "docs" / "examples" / "cluster" / "slurm.sh"
    words = ["bash", str(script), "quickstart", *small(untrained), "name=first"]
    with socket.socket() as other:
        with suppress(OSError):
            other.bind(("0.0.0.0", AGENT_PORT))
            other.listen()
        done = run(words, tmp_path, {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", **ports}, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job slurm-7 succeeded" in done.stderr
    assert (tmp_path / "runs" / "first" / "model" / "config.json").exists()
    assert not list(tmp_path.glob(".*token"))


SRUN = """#!/bin/bash
echo "$@" >> SHEET
exec sleep 600
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames head,localhost" ] && printf 'head\\nlocalhost\\n'
"""


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(500)
def test_the_slurm_script_starts_ray_on_the_other_nodes_by_slurms_names(untrained, tmp_path):
    """Two nodes, the second of which never comes up: the run fits on the head, which has the address from which it reaches
    that one."""
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "slurm").mkdir()
    python(tmp_path / "slurm" / "scontrol", "").write_text(SCONTROL)
    python(tmp_path / "slurm" / "srun", "").write_text(SRUN.replace("SHEET", str(tmp_path / "sheet")))
    port, dashboard = free_ports(2)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "head,localhost", "SLURMD_NODENAME": "head"}
    slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "9", "NODES_WAIT_S": "200"}
    ports = {"RAY_PORT": str(port), "RAY_DASHBOARD_PORT": str(dashboard), "PATH": f"{tmp_path / 'slurm'}:{BARE}"}
    script = ROOT / "docs" / "examples" / "cluster" / "slurm.sh"
    words = ["bash", str(script), "quickstart", *small(untrained), "name=first"]
    done = run(words, tmp_path, slurm | ports, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    options = (tmp_path / "sheet").read_text().split()
    assert options[:4] == ["--nodes=1", "--ntasks=1", "--exclude=head", "--cpu-bind=none"]
    assert options[5:8] == ["start", "--block", f"--address=127.0.0.1:{port}"]
    assert (tmp_path / "runs" / "first" / "model" / "config.json").exists()


def test_the_slurm_script_refuses_a_mistake_before_it_starts_a_cluster(tmp_path):
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    script = ROOT / "docs" / "examples" / "cluster" / "slurm.sh"
    words = ["bash", str(script), "quickstart", "learner.learning_rat=1"]
    done = run(words, tmp_path, {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "8"}, timeout=240)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "learner.learning_rat" in done.stderr
    assert "ray" not in (done.stdout + done.stderr).lower()
    assert not list(tmp_path.glob(".*token"))


PROCESS_GIB = 5.0
"""Host memory of one process with a CUDA context, assumed."""


def read_kuberay_job():
    """Return the configuration that the job trains, and each of its groups of pods, as often as it has pods."""
    job = yaml.safe_load((ROOT / "docs" / "examples" / "cluster" / "rayjob.yaml").read_text())
    command, verb, preset, *words = shlex.split(job["spec"]["entrypoint"])
    assert (command, verb) == ("r3async", "train")
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]] + [g for g in cluster["workerGroupSpecs"] for _ in range(g["replicas"])]
    overrides = [word for word in words[: words.index("--runs")] if not word.startswith("model.path=")]
    return load_config(preset, overrides), pods


def count_gib(text):
    assert text.endswith("Gi")
    return float(text.removesuffix("Gi"))


def test_the_job_for_kuberay_has_pods_that_hold_what_its_plan_says():
    config, pods = read_kuberay_job()
    plan = make_run_plan(config)
    nodes = []
    for index, pod in enumerate(pods):
        (container,) = pod["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        cpus, gpus = int(limits["cpu"]), int(limits["nvidia.com/gpu"])
        nodes.append(ClusterNode(f"pod-{index}", f"pod-{index}", cpus, gpus, cpus, gpus, is_local=not index))
        mounts = {place["mountPath"]: place["name"] for place in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["template"]["spec"]["volumes"]}
        assert "/runs" in mounts
        shared = count_gib(volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"])
        objects = int(pod["rayStartParams"]["object-store-memory"]) / GIB
        in_shared = 2 * plan.version_bytes / GIB + objects
        assert shared >= in_shared
        if config.supervise.copy_steps:
            assert objects >= 3 * plan.checkpoint_bytes / GIB
        # On the learner's host: the copies that a version and a checkpoint are written from, and what was received.
        copies = (plan.version_bytes + plan.checkpoint_bytes + config.transport.credit_bytes) / GIB
        copies += 8 * plan.parameters / GIB * config.learner.offload_moments
        processes = PROCESS_GIB * (gpus + 3)
        assert count_gib(limits["memory"]) >= in_shared + copies + processes
    assert len(nodes) == len(plan.hosts)
    fit = check_cluster_fit(plan, config, nodes)
    assert fit.problems == []
    assert set(fit.layout.rank_hosts()) == {"pod-0"}, "the command and the learner are where the run's directory is"


PROGRAM = """
import r3async

class Sums:
    def reset(self, task_seed):
        return f"{task_seed % 9}+1="
    def step(self, action):
        return r3async.StepResult(float(len(action.text)), done=True)
    def oracle(self):
        return "1"

heard = []
r3async.train("quickstart", environment=Sums, callbacks=[lambda record: heard.append(record.step)], runs=RUNS, name="job",
    steps=1, model={"init": {"max_warm_steps": 2, "warm_reward": 0}}, learner={"threads": 1}, weights={"probe": False},
    generator={"engine": "scripted"}, schedule={"prompts_per_step": 2, "group_size": 2})
print("heard of", heard)
"""


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_program_that_trains_a_class_of_its_own_is_a_job(token_cluster, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.replace("RUNS", repr(str(tmp_path / "runs"))))
    line = [
        Path(sys.executable).with_name("ray"),
        "job",
        "submit",
        "--working-dir",
        ".",
        "--",
        sys.executable,
        "train.py",
    ]
    done = run(line, tmp_path, token_cluster | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "heard of [1]" in done.stdout
    assert (tmp_path / "runs" / "job" / "model" / "config.json").is_file()
