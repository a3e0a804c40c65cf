#!/usr/bin/env bash
# trl 1.16.0: nine of its training templates write an answer anew when another question follows.
#
# Guess: a template named `_training`, made prefix-preserving, writes earlier messages alike whatever follows.
# Behaviour: they preserve the prefix when a tool's message follows. When a user's message follows an answer with
# `reasoning_content`, nine templates leave the thoughts out again or change the answer's end. A loop with several user
# turns that renders the conversation again trains on a context which the policy never saw.
# Seen on Python 3.11: diffusion_gemma, glm4moe, gptoss, nemotron_3_5_lightning, nemotron_3_nano, nemotron_3_super,
# nemotron_3_ultra with thoughts; phi3 and phi3_5 end the last answer otherwise, with or without them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 jinja2 numpy && "$folder/env/bin/pip" install --quiet --disable-pip-version-check --no-deps trl==1.16.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import importlib.util
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

folder = pathlib.Path(importlib.util.find_spec("trl").submodule_search_locations[0], "chat_templates")
answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "because"}]


def render(template, messages):
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return render_jinja_template([messages], chat_template=template, add_generation_prompt=False, **special)[0][0]


seen = set()
for path in sorted(folder.glob("*_training.jinja")):
    template = path.read_text()
    try:
        before = render(template, answered)
        after = render(template, [*answered, {"role": "user", "content": "again"}])
    except Exception:  # Templates of vision models want another form of content.
        continue
    if not after.startswith(before.rstrip("\n")):
        seen.add(path.stem.removesuffix("_training"))
print(sorted(seen))
assert seen == {
    "diffusion_gemma", "glm4moe", "gptoss", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super",
    "nemotron_3_ultra", "phi3", "phi3_5",
}
PYTHON
