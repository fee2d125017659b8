"""`crossover`, but that levels warm up for half a second in place of five, and that capacities are
simulated with few requests: for campaigns in a process of their own.

    python -m tests.end_to_end.short_campaign campaign run campaign.toml
"""

import crossover
from crossover.loadtests.campaign import next_measurement
from tests.loadtests.capacity.few_requests import few_requests

WARMUP_SECONDS = 0.5  # answers of the servers here take less

if __name__ == "__main__":
    next_measurement.MIN_WARMUP_SECONDS = WARMUP_SECONDS
    with few_requests(500):
        crossover.main()
