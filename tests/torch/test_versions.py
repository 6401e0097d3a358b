# SPDX-License-Identifier: MIT
"""Versions of transformers outside the tested range."""

import pytest
from kvmeld_torch import _versions


def test_the_range_is_what_the_guide_says(guide):
    assert f"transformers {_versions.OLDEST} to {_versions.NEWEST}" in guide


def test_a_version_below_the_range_is_refused_and_one_above_it_gives_a_warning(recwarn):
    for version in ("5.1.0", "5.9.0", "5.24.3"):
        _versions.check(version)
    assert not recwarn.list
    for version in ("5.0.9", "4.57.6"):
        with pytest.raises(ImportError, match=f"kvmeld_torch: expected transformers 5.1 to 5.24, got {version}"):
            _versions.check(version)
    for version in ("5.25.0", "6.0.0.dev0"):
        with pytest.warns(UserWarning, match=f"expected transformers 5.1 to 5.24, got {version}, which is not tested"):
            _versions.check(version)
