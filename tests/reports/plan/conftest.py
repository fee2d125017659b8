import pytest


@pytest.fixture(scope="module", autouse=True)
def few_requests(capacities_of_few_requests: None) -> None:
    """Plans are made of capacities that are quick to simulate."""
