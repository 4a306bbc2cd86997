"""`paceline tune`: measures what drafters cost and gain on the user's model and prompts, and keeps what
`auto` starts from. The work is done in measure/tune.py.
"""

from __future__ import annotations

from functools import partial

from paceline.cli.bench import measured
from paceline.cli.options import as_command
from paceline.measure.options import Tune

tune = as_command(Tune, partial(measured, "tune"))
tune.__name__ = "tune"
