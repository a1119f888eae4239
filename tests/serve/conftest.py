from __future__ import annotations

import pytest

from serve.server import serving


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The demo model with its states kept in memory; shared by all tests that leave it as it was."""
    with serving(tmp_path_factory.mktemp("server"), "--context", "4096", "--prefixes", "64MB") as running:
        yield running
