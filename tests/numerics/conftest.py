# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of two FSDP ranks, which takes seconds to make."""

import pytest


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    from saved_checkpoints import save

    return save(2, tmp_path_factory.mktemp("two"))
