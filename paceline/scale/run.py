"""`paceline serve --replicas N`: the server's own loop (server/run.py) with a front for replicas where else
the app with its engine is. Invariant: what Ray opens of ports takes nothing without this run's token.
"""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec

from paceline.server import processes, run
from paceline.server.config import ServerConfig
from paceline.server.metrics import Metrics

for name in ("ray", "aiohttp"):  # imported later: Ray reads variables that are set first
    if find_spec(name) is None:
        raise ModuleNotFoundError(name=name)


def serve(config: ServerConfig) -> int:
    """Until a signal; the exit status."""
    processes.set_up_logs(config.log_level, "front")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.address is None:  # who reaches a cluster's ports may run code
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    from paceline.scale.cluster import Cluster
    from paceline.scale.fleet import Fleet
    from paceline.scale.front import front_app

    name = run.name_of(config)
    fleet = Fleet(config, Metrics(name), Cluster(config))
    return run.serve_app(front_app(fleet), fleet, name)
