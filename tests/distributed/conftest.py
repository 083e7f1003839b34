import pytest

from tests.distributed.ranks import Ranks


def _ranks(size, tmp_path_factory):
    ranks = Ranks(size, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    yield from _ranks(4, tmp_path_factory)
