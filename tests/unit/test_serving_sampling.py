"""What a request may ask of sampling and of the template: what the episode has."""

import pytest

from r3async.config import EpisodeConfig
from r3async.rollout.agents.chat_completions import read_chat
from r3async.rollout.agents.protocol import Refused


def test_what_the_episode_has_may_be_asked_for():
    settings = EpisodeConfig(
        top_p=0.9, top_k=5, stop=["x"], template_args={"reasoning_effort": "high", "thinking": True}
    )
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 5,
        "stop": "x",
        "reasoning_effort": "high",
        "chat_template_kwargs": {"thinking": True},
    }
    assert read_chat(asked, settings, {})
    with pytest.raises(Refused, match=r"episode\.template_args\.thinking = True"):
        read_chat(asked | {"chat_template_kwargs": {"thinking": False}}, settings, {})
