from loadtests.host.prometheus_scrape import *  # noqa: F403
from loadtests.host.prometheus_scrape import ENGINE_TIME, NAMES, Remote, parse  # noqa: F401
