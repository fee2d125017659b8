"""What Locust loads: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000 --rate 2 --headless`.

With `--processes 4` or with master and workers each process sends its share of one arrival process. Without --headless the web page at
http://localhost:8089 starts the same. Everything is in loadtests/users.py.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # also from a checkout that is not installed

from loadtests.users import Traffic, register

register()

__all__ = ["Traffic"]
