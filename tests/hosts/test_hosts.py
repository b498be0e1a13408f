"""A short form of `make hosts`; skipped where namespaces can't be made."""

from __future__ import annotations

import pytest

from tests.hosts.__main__ import rows_of
from tests.hosts.cases import files_on_one_host, no_shared_file_system
from tests.hosts.hosts import why_not
from tests.hosts.local_cases import local_damage, local_disks, local_merged


@pytest.mark.nightly
def test_hosts_without_a_directory_in_common() -> None:
    if why := why_not():
        pytest.skip(why)
    rows = rows_of([no_shared_file_system, files_on_one_host])
    assert all(row.ok for row in rows), rows


@pytest.mark.nightly
def test_hosts_with_disks_of_their_own() -> None:
    if why := why_not():
        pytest.skip(why)
    rows = rows_of([local_disks, local_damage, local_merged])
    assert all(row.ok for row in rows), rows
