"""What `serve` is told of replicas is refused where it is wrong, and the files in deploy/ray say what there is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.errors import ConfigError
from paceline.scale.app import build, cpus_of, replicas
from paceline.scale.samples import joined
from paceline.server.config import ServerConfig, resolve
from tests.server.harness import CODE

RAY = Path(__file__).parents[2] / "deploy" / "ray"


def test_help_tells_of_replicas() -> None:
    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for flag in ("--replicas", "--autoscale", "--address", "--replica-cpus", "--kv-events"):
        assert flag in told


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"replicas": 0}, "replicas is 0; use 1 to 1024"),
        ({"autoscale": "3:2"}, "autoscale is '3:2'; write LEAST:MOST"),
        ({"autoscale": "0:2"}, "autoscale is '0:2'; write LEAST:MOST"),
        ({"autoscale": "many"}, "autoscale is 'many'; write LEAST:MOST"),
        ({"autoscale": "1:2", "replicas": 2}, "give it without replicas"),
        ({"address": "auto"}, "it is for --replicas or --autoscale"),
        ({"replica_cpus": 2}, "it is for --replicas or --autoscale"),
        ({"kv_events": "5557"}, "write tcp://ADDRESS:PORT"),
    ],
)
def test_what_is_wrong_is_refused(flags: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        resolve(flags, {})


def test_a_range_becomes_rays_scaling() -> None:
    config = resolve({"autoscale": "1:8", "max_num_seqs": 6}, {"PACELINE_REPLICA_CPUS": "2"})
    assert config.spread == (1, 8)
    made = replicas(config, cpus_of(config, is_local=False))._bound_deployment
    scaling = made._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 8, 3)
    assert made.ray_actor_options["num_cpus"] == 2
    assert cpus_of(ServerConfig(replicas=1000), is_local=True) == 1
    with pytest.raises(ConfigError, match="replica_cpus is not given"):
        cpus_of(ServerConfig(replicas=2), is_local=False)
    assert ServerConfig().spread == (0, 0)


def test_without_ray_the_error_names_the_extra() -> None:
    code = CODE.replace("from paceline.cli", "import sys; sys.modules['ray'] = None\nfrom paceline.cli")
    command = [sys.executable, "-c", code, "serve", "--replicas", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--replicas and --autoscale need ray" in done.stderr
    assert "pip install 'paceline[scale]'" in done.stderr


def applications() -> dict[str, dict[str, Any]]:
    service = yaml.safe_load((RAY / "rayservice.yaml").read_text())
    files = {"serve.yaml": yaml.safe_load((RAY / "serve.yaml").read_text())}
    files["rayservice.yaml"] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return files


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_serve_files_are_ones_that_serve_takes(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(applications()[name])
    (application,) = schema.applications
    assert application.import_path == "paceline.scale.app:build"
    assert build(application.args)._bound_deployment.name == "Front"


def test_the_service_has_room_for_its_replicas() -> None:
    spec = yaml.safe_load((RAY / "rayservice.yaml").read_text())
    assert (spec["apiVersion"], spec["kind"]) == ("ray.io/v1", "RayService")
    (group,) = spec["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    (application,) = applications()["rayservice.yaml"]["applications"]
    assert int(container["resources"]["limits"]["cpu"]) >= application["args"]["replica_cpus"]
    config = resolve(application["args"], {})
    assert (group["minReplicas"], group["maxReplicas"]) == config.spread


def test_compose_starts_two_nodes_with_flags_that_there_are() -> None:
    nodes = yaml.safe_load((RAY / "compose.yaml").read_text())["services"]
    assert set(nodes) == {"head", "worker"}
    for node in nodes.values():
        assert (RAY / node["build"]["context"] / node["build"]["dockerfile"]).is_file()
        assert node["environment"]["RAY_AUTH_MODE"] == "token"
    words = shlex.split(nodes["head"]["command"][0].partition("paceline serve ")[2])
    flags = {words[i].removeprefix("--").replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    assert resolve(flags, {}).spread == (2, 2)
    assert "ARG EXTRAS" in (RAY.parent / "Dockerfile").read_text()


def test_a_builder_refuses_what_it_does_not_know() -> None:
    for args, why in (
        ({"replicas": 2, "port": 1}, "that is Serve's own"),
        ({"replica": 2}, "did you mean 'replicas'?"),
        ({"model": "default"}, "neither replicas nor autoscale"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            build(args)


def test_samples_of_all_replicas_make_one_text() -> None:
    about = "# HELP a Of a.\n# TYPE a counter\n"
    text = joined({"x": f'{about}a_total{{m="1"}} 2.0\nb 3.0\n', "y": f'{about}a_total{{m="1"}} 4.0\n'})
    lines = ['a_total{replica="x",m="1"} 2.0', 'b{replica="x"} 3.0', 'a_total{replica="y",m="1"} 4.0']
    assert text == about + "\n".join(lines) + "\n"
