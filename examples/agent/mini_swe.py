"""mini-swe-agent, unchanged from its package, mends a function in a directory of its own.

It needs the command `mini` on the PATH (`pipx install mini-swe-agent`), OPENAI_BASE_URL and OPENAI_API_KEY. To train on it:

    [env]
    name = "agent-command"
    args = { command = ["python", "mini_swe.py"] }

The commands that the model writes run as your user: see the page of this folder.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = Path(__file__).with_name("mini_swe.yaml")
PROMPT = "`python check.py` fails in this directory. Mend work.py."
TASKS = [
    (
        "def mean(values):\n    return sum(values) / (len(values) - 1)\n",
        "import work\n\nassert work.mean([2, 4, 9]) == 5\n",
    ),
    (
        "def largest(values):\n    return min(values)\n",
        "import work\n\nassert work.largest([4, 9, 2]) == 9\n",
    ),
    (
        "def last(values):\n    return values[0]\n",
        "import work\n\nassert work.last([4, 9, 2]) == 2\n",
    ),
    ("def middle(a, b):\n    return a + b / 2\n", "import work\n\nassert work.middle(4, 8) == 6\n"),
]
"""Files work.py, each with a fault, and check.py."""


def play(task_seed: int) -> float:
    """One episode. The reward is 1 if the check passes at the end, however the agent ended."""
    work, check = random.Random(task_seed).choice(TASKS)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "work.py").write_text(work)
        Path(directory, "check.py").write_text(check)
        # It reads nothing from the home directory or the network, and does not repeat a request that was refused.
        variables = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{directory}/.mini",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "PYTHONDONTWRITEBYTECODE": "1",  # two versions of work.py of one second and size would be taken for one
        }
        command = [
            "mini",
            "--config",
            str(SETTINGS),
            "--task",
            PROMPT,
            "--output",
            f"{directory}/.mini/trajectory.json",
        ]
        subprocess.run(command, cwd=directory, env=os.environ | variables, stdout=sys.stderr)
        Path(directory, "check.py").write_text(check)  # as it was
        return float(
            subprocess.run(
                [sys.executable, "check.py"], cwd=directory, capture_output=True
            ).returncode
            == 0
        )


if __name__ == "__main__":
    print(json.dumps({"reward": play(int(os.environ["R3ASYNC_TASK_SEED"]))}))
