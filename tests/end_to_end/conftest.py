from tests.loadtests.conftest import truth_server

__all__ = ["truth_server"]
