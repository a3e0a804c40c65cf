"""Version spans cover every sampled token, exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.data.versions import VersionSpan, VersionSpanRecorder, expand_version_spans


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=6), st.integers(0, 4))
def test_each_token_has_the_version_that_was_installed_when_it_was_sampled(updates, rest):
    recorder, expected, version = VersionSpanRecorder(3), [], 3
    for tokens, jump in updates:
        expected += [version] * tokens
        version += jump
        recorder.stamp_version(len(expected), version)
    expected += [version] * rest
    assert expand_version_spans(recorder.finish_spans(len(expected)), len(expected)).tolist() == expected


def test_versions_do_not_go_backwards():
    recorder = VersionSpanRecorder(3)
    with pytest.raises(ValueError, match="backwards"):
        recorder.stamp_version(1, 2)


@pytest.mark.parametrize(
    "spans", [[VersionSpan(0, 0, 2)], [VersionSpan(0, 1, 3)], [VersionSpan(0, 0, 1), VersionSpan(1, 2, 3)]]
)
def test_spans_with_a_gap_are_refused(spans):
    with pytest.raises(ValueError, match="spans"):
        expand_version_spans(spans, 3)
