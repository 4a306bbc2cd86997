"""The application for Ray Serve. `replicas` is the deployment of servers; `build`, named in a Serve config
file as `import_path: paceline.scale.app:build`, puts the front before it as the ingress. Invariant: what is
deployed is made of options that were checked here, before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import Receive, Scope, Send

from paceline.core.errors import ConfigError
from paceline.core.options import nearest, options_of
from paceline.cpu.cores import usable_cores
from paceline.scale.fleet import Fleet
from paceline.scale.front import front_app
from paceline.scale.replica import Replica
from paceline.server import processes, run
from paceline.server.config import ServerConfig, resolve
from paceline.server.metrics import Metrics

ROUTER = "paceline.scale.router:PrefixRouter"
SERVES = ("host", "port", "ssl_certfile", "ssl_keyfile", "address")  # what Serve decides where a file deploys
QUESTIONS = 32  # requests that need no engine, beside those that wait for it
LOGS = {"log_level": "WARNING", "enable_access_log": False}  # Ray's own; ours says each request


def cpus_of(config: ServerConfig, is_local: bool) -> int:
    """Cores of each replica, and the threads of its engine."""
    if config.replica_cpus is not None:
        return config.replica_cpus
    if is_local:
        return max(1, usable_cores(False) // config.spread[1])
    if config.device.startswith("cuda"):
        return 2
    raise ConfigError("replica_cpus is not given; on a cluster say how many cores each replica has, as 8")


def replicas(config: ServerConfig, num_cpus: int) -> Any:
    """The deployment, as Serve takes it."""
    options = {**asdict(config), "served_model_name": run.name_of(config), "cors_origin": ()}
    options |= dict.fromkeys(("replicas", "autoscale", "replica_cpus", "address"))
    ranks = config.tensor_parallel_size
    needs: dict[str, Any] = {"num_cpus": num_cpus}
    if config.device.startswith("cuda"):
        needs["num_gpus"] = ranks
    least, most = config.spread
    size: dict[str, Any] = {"num_replicas": least}
    if config.autoscale is not None:
        target = max(1, config.max_num_seqs // 2)
        scaling = AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=target, upscale_delay_s=10
        )
        size = {"autoscaling_config": scaling}
    slack = max(2, config.max_num_seqs // 2)
    router = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"slack": slack})
    made = serve.deployment(
        Replica,
        name="Replica",
        **size,
        ray_actor_options=needs,
        max_ongoing_requests=config.max_num_seqs + config.max_queue + QUESTIONS,
        request_router_config=router,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        max_constructor_retry_count=3,
        logging_config=LOGS,
    )
    return made.bind(options, max(1, num_cpus // ranks))


@serve.deployment(
    name="Front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000, logging_config=LOGS
)
@serve.ingress()
class Ingress:
    async def __init__(self, handle: Any, options: dict[str, Any]) -> None:  # type: ignore[misc]
        config = ServerConfig(**options)
        processes.set_up_logs(config.log_level, "front")
        self.fleet = Fleet(config, Metrics(run.name_of(config)), _Deployed(handle))
        self.task = asyncio.create_task(self.fleet.run())

    def __serve_build_asgi_app__(self) -> Any:
        front = front_app(self.fleet)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                return await front(scope, receive, send)
            for event in ("startup", "shutdown"):  # Serve waits for an answer to each
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

        return app

    async def check_health(self) -> None:
        if self.task.done():
            raise RuntimeError("the front does not look after its replicas any more")


class _Deployed:
    """A cluster that is there already, and stays."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def start(self) -> Any:
        return self._handle

    def settle(self) -> None:
        return None

    def trouble(self) -> str | None:
        return None

    def stop(self) -> None:
        return None


def build(args: Mapping[str, Any]) -> Any:
    """For Serve config files; args: options of `paceline serve`, by name."""
    known = [each.name for each, _ in options_of(ServerConfig)]
    for name in args:
        if name in SERVES:
            raise ConfigError(f"args has {name!r}; that is Serve's own: see http_options in its config file")
        if name not in known:
            raise ConfigError(f"args has no option {name!r}; {nearest(name, known)}")
    config = resolve(args, {})
    if not config.spread[1]:
        raise ConfigError("args has neither replicas nor autoscale; give one of them, as replicas: 2")
    ingress: Any = Ingress
    return ingress.bind(replicas(config, cpus_of(config, is_local=False)), asdict(config))
