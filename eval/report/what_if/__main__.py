"""``python -m eval.report.what_if``: compile the simulator ahead, and keep it on disk for the reports to come.

It takes a minute, and gives way to whatever else runs.
"""

import os

from eval.report.what_if.ask import warm_up
from radix_cache.simulator import Setting

os.nice(10)
warm_up(Setting())
