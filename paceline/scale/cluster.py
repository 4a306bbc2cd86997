"""The Ray cluster under `paceline serve --replicas`: one of our own on this machine, or one that is joined.
Invariant: of our own nothing is left when it is stopped: no process, no shared memory, no folder; of another
only our application is taken away.
"""

from __future__ import annotations

import logging
import re
import shutil
import signal
import tempfile
from typing import Any

import ray
from ray import serve
from ray.serve.config import ProxyLocation

from paceline.core.errors import ConfigError
from paceline.cpu.cores import usable_cores
from paceline.scale.app import LOGS, cpus_of, replicas
from paceline.server.config import ServerConfig
from paceline.server.run import name_of

APP = "paceline"
TRIES = 5  # to start a cluster: Ray gives up after 30 seconds, too few on a busy machine
LEAST_MEMORY = 80 * 2**20  # bytes of Ray's object store, which nothing here uses
OURS = re.compile(r"(?:ModelError|ConfigError): (.*)")  # in the trace of a replica that could not start


class Cluster:
    def __init__(self, config: ServerConfig) -> None:
        self.config, self.is_own = config, config.address is None
        self.num_cpus = cpus_of(config, self.is_own)
        self._folder: str | None = None

    def start(self) -> Any:
        """A handle of the replicas, which come by and by."""
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": APP}
        if self.is_own:
            self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path: it has sockets
            options |= {
                "num_cpus": max(usable_cores(True), self.num_cpus * self.config.spread[1]),
                "object_store_memory": LEAST_MEMORY,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": self._folder,
            }
        _quiet()
        for left in reversed(range(TRIES if self.is_own else 1)):
            try:
                ray.init(address=self.config.address or "local", **options)
                break
            except Exception as error:  # of Ray's many kinds; Exception itself where a busy machine is slow
                ray.shutdown()
                if not left:
                    what = f"address {self.config.address}" if self.config.address else "a Ray cluster"
                    does = "be joined" if self.config.address else "start here"
                    raise ConfigError(f"{what} cannot {does}: {str(error).splitlines()[0]}") from None
        serve.start(proxy_location=ProxyLocation.Disabled, logging_config=LOGS)
        _quiet()
        target = serve.RunTarget(
            replicas(self.config, self.num_cpus), name=self.name, route_prefix=None, logging_config=None
        )
        return serve.run_many([target], wait_for_applications_running=False)[0]

    def settle(self) -> None:
        """Signals are ours again: Ray's library takes them, and writes where in its code they came."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))

    @property
    def name(self) -> str:
        """Of the application: several models may share a cluster."""
        return APP if self.is_own else f"{APP}-{re.sub('[^A-Za-z0-9]+', '-', name_of(self.config))}"

    def trouble(self) -> str | None:
        """Why no replica will come; None: one may."""
        found = serve.status().applications.get(self.name)
        if found is None or found.status not in ("DEPLOY_FAILED", "UNHEALTHY"):
            return None
        told = "\n".join([found.message, *(each.message for each in found.deployments.values())])
        why = OURS.search(told)
        return why[1] if why else f"no replica could be started: {told.strip()[-400:]}"

    def stop(self) -> None:
        if ray.is_initialized():
            if self.is_own:
                serve.shutdown()
            else:
                serve.delete(self.name)
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _quiet() -> None:
    """Ray's lines are warnings among ours, as JSON."""
    for name in ("ray", "ray.serve", "ray.util.client"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True
