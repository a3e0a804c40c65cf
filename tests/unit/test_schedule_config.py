"""Settings of the schedule that cannot work are refused, and moved ones are named."""

import re

import pytest

from r3async.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("schedule.window=0", "[schedule] `window` must be greater than 0"),
        ("schedule.max_token_age=-1", "[schedule] `max_token_age` must be 0 or more"),
        ("schedule.split=never", "`schedule.split` = 'never'"),
        (
            "algorithm.correction.max_token_age=2",
            "`algorithm.correction.max_token_age`: it is `schedule.max_token_age`",
        ),
    ],
)
def test_what_can_not_work_is_refused(override, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config("quickstart", [override])
