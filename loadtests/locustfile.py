"""What Locust loads: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --rate 2`.

With `--processes 4`, or master and workers, each process sends its share of one arrival process.
"""

import os
import sys

# Works from a checkout that is not installed, too.
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from loadtests.load_generator.inside_locust import Traffic, register

register()

__all__ = ["Traffic"]
