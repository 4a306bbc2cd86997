"""Real replicas on Ray Serve: what one server answers they answer, the conversation's own replica reads it,
and a replica that is killed costs no request of which nothing was streamed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.scale.conftest import STARTS_S
from tests.server.conftest import DRAFTERS, KEYS
from tests.server.harness import WAIT_S, Server, start_server

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {"prompt": "In a paceline,", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
NUM_CHATS, NUM_TURNS = 32, 4
ENDS_S = 10.0  # within which every request has a result or an error once its replica is gone


def processes(pattern: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if re.search(pattern, line):
            found[int(folder.name)] = line
    return found


def below(pid: int) -> set[int]:
    """All processes under one, however deep."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {pid}


def replica_processes(server: Server) -> list[int]:
    own = below(server.process.pid)
    return [pid for pid in processes(r"^ray::ServeReplica:paceline:Replica") if pid in own]


def wait_for(what: str, is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def num_ready(server: Server) -> int:
    return list(server.http.get("/ready").json()["replicas"].values()).count("ok")


def total(server: Server, name: str) -> float:
    return sum(values_of(figures(server), name))


def values_of(now: dict[str, float], name: str) -> list[float]:
    """One of each replica, and of the front."""
    return [value for key, value in now.items() if key.partition("{")[0] == f"paceline:{name}"]


def figures(server: Server) -> dict[str, float]:
    """With those of all replicas: one that is slow to answer is left out, and then they are asked again."""
    count = len(server.http.get("/ready").json().get("replicas", ())) or 1
    return server.figures_when(lambda now: len(values_of(now, "engine_up")) >= count, "all figures")


@pytest.mark.parametrize("file", ["test_openai_client.py", "test_anthropic_client.py", "test_responses.py"])
def test_the_clients_tests_pass_through(replicas: Server, file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/server/{file}"]
    given = {**os.environ, "PACELINE_TEST_SERVER": replicas.url}
    given.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_front_says_what_the_replicas_do(replicas: Server) -> None:
    state = replicas.http.get("/ready").json()
    assert state["status"] == "ok"
    assert len(state["replicas"]) == 2

    def labels() -> set[str]:  # one that is slow to answer is left out
        return set(re.findall(r'paceline:engine_up\{replica="(\w+)"', replicas.http.get("/metrics").text))

    wait_for("all figures", lambda: labels() == {*state["replicas"], "front"}, WAIT_S)
    assert replicas.metrics()['paceline:replicas{replica="front"}'] == 2
    refused = httpx.post(f"{replicas.url}/v1/completions", json=LONG)
    assert refused.status_code == 401, "the front asks for a key"
    for path in ("/@127.0.0.1:1/v1/models", "/v1/models/@127.0.0.1:1", "/v1/nothing"):
        assert replicas.http.get(path).status_code == 404, path


def chats(server: Server) -> float:
    """Hits of the prefix cache, in tokens, of a chat workload."""
    before = total(server, "prefix_cache_hits_total")
    texts: dict[int, list[dict[str, str]]] = {}

    def turn(chat: int) -> None:
        said = texts.setdefault(chat, [{"role": "system", "content": "You ride in a paceline. Be brief."}])
        said.append(
            {"role": "user", "content": f"Rider {chat} asks the {len(said)}th time: who rides in front?"}
        )
        body = {"messages": said, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        said.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})

    with ThreadPoolExecutor(8) as pool:
        for _ in range(NUM_TURNS):
            list(pool.map(turn, range(NUM_CHATS)))
    server.figures_when(
        lambda now: not any(v for k, v in now.items() if "num_requests_running" in k), "the end"
    )
    time.sleep(0.5)  # figures are a fifth of a second old
    return total(server, "prefix_cache_hits_total") - before


def test_conversations_hit_as_much_as_in_one_server(replicas: Server, wide_folder: Path) -> None:
    """Routing by prefix gives at least 90 % of the hits that one server has."""
    hits = chats(replicas)
    one = start_server(str(wide_folder), "--speculative-config", DRAFTERS)
    try:
        most = chats(one)
    finally:
        one.kill()
    shares = [v for k, v in figures(replicas).items() if k.startswith("paceline:prompt_tokens_total{")]
    print(f"hits: {hits:,.0f} tokens of two replicas, {most:,.0f} of one server ({hits / most:.1%})")
    assert hits >= 0.9 * most > 0
    assert len([share for share in shares if share > 0.2 * sum(shares)]) == 2, "both do their part"


def test_a_killed_replica_costs_no_request_that_had_said_nothing(replicas: Server) -> None:
    wait_for("both replicas", lambda: num_ready(replicas) == 2, STARTS_S)
    expected = replicas.post("/v1/completions", **LONG).json()["choices"][0]["text"]
    stop, whole, streams, broken = threading.Event(), list[str](), list[str](), list[float]()

    def ask(is_stream: bool) -> None:
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        with httpx.Client(base_url=replicas.url, headers=headers, timeout=WAIT_S) as http:
            while not stop.is_set():
                began = time.monotonic()
                answer = http.post("/v1/completions", json={**LONG, "stream": is_stream})
                assert answer.status_code == 200, answer.text
                if not is_stream:
                    whole.append(answer.json()["choices"][0]["text"])
                    continue
                assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
                streams.append(answer.text)
                if '"error":' in answer.text:
                    assert '"engine_lost"' in answer.text
                    broken.append(time.monotonic() - began)

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number % 2 == 0) for number in range(8)]
        wait_for("requests at both", lambda: len(whole) + len(streams) > 8, WAIT_S)
        victim = replica_processes(replicas)[0]
        os.kill(victim, signal.SIGKILL)
        killed, seen = time.monotonic(), len(whole)
        wait_for("answers of the other", lambda: len(whole) >= seen + 8, WAIT_S)
        print(
            f"8 whole answers {time.monotonic() - killed:.1f} s after the death, {len(broken)} streams broken"
        )
        stop.set()
        for each in asking:
            each.result()
    assert set(whole) == {expected}
    assert replicas.http.get("/ready").status_code == 200, "one was there all the time"
    wait_for("the second replica", lambda: num_ready(replicas) == 2, STARTS_S)


def refusal(server: Server) -> httpx.Response:
    """What a request gets while there is no replica."""
    found: list[httpx.Response] = []

    def is_refused() -> bool:
        if server.http.get("/ready").status_code == 503:
            found.append(server.post("/v1/completions", **LONG | {"max_tokens": 1}))
        return bool(found) and found[-1].status_code == 503

    wait_for("a refusal", is_refused, WAIT_S)
    return found[-1]


def test_without_replicas_the_front_is_unready_and_comes_back(replicas: Server) -> None:
    wait_for("both replicas", lambda: num_ready(replicas) == 2, STARTS_S)

    def ask() -> tuple[httpx.Response, float]:
        return replicas.post("/v1/completions", **LONG), time.monotonic()

    with ThreadPoolExecutor(5) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        unready = pool.submit(refusal, replicas)  # others may be there before all four have their answers
        time.sleep(0.1)
        for pid in replica_processes(replicas):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        answers = [each.result() for each in asking]
    for answer, ended in answers:
        assert answer.status_code == 200 or ended - killed < 2 * ENDS_S
        assert answer.status_code in (200, 503)
        assert answer.status_code == 200 or answer.json()["error"]["code"] in (
            "engine_lost",
            "engine_unavailable",
        )
    refused = unready.result()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    replicas.wait_until_ready(STARTS_S)
    assert replicas.post("/v1/completions", **LONG).status_code == 200


def test_a_config_file_deploys_the_same(wide_folder: Path, tmp_path: Path) -> None:
    """deploy/ray/serve.yaml with another model, port and fewer replicas, by Ray's own command."""
    import yaml

    from tests.scale.test_kv_events import free_port

    config, port = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text()), free_port()
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    given = {"model": str(wide_folder), "replicas": 1, "replica_cpus": 1, "served_model_name": "tiny"}
    config["applications"][0]["args"] = given
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    serve = Path(sys.executable).with_name("serve")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(serve), "run", str(tmp_path / "serve.yaml")]
    log = tmp_path / "log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    server = Server(start(), log, url=f"http://127.0.0.1:{port}")
    try:
        server.connect()

        def answers() -> bool:
            if server.process.poll() is not None:  # Ray's 30 seconds are too few on a busy machine
                assert "timed out during startup" in log.read_text(), log.read_text()[-3000:]
                server.process = start()
            try:
                return server.http.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_for("the application", answers, STARTS_S)
        whole = server.post("/v1/completions", prompt="In a paceline,", max_tokens=8, temperature=0)
        assert whole.json()["usage"]["completion_tokens"] == 8
        chunks = list(server.client.completions.create(model="tiny", prompt="In", max_tokens=8, stream=True))
        assert chunks[-1].choices[0].finish_reason
    finally:
        server.close()
        server.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):  # how Ray's own command ends is not ours
            server.process.wait(120)
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()


def test_ctrl_c_leaves_nothing(replicas: Server) -> None:
    """Last of this file: it ends the server that the others use."""
    replicas.wait_until_ready(STARTS_S)
    own = below(replicas.process.pid)
    assert len(own) > 5
    lines = [line for pid, line in processes(r"gcs_server").items() if pid in own]
    folders = {Path(part) for line in lines for part in re.findall(r"/tmp/ray-\w+", line)}
    replicas.close()
    for pid in (replicas.process.pid,):
        os.kill(pid, signal.SIGINT)
    assert replicas.process.wait(WAIT_S) == 0, replicas.log.read_text()[-3000:]
    wait_for("its processes to end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in own), WAIT_S)
    assert not [path for path in folders if path.exists()]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{replicas.url}/health")
    replicas.lines()  # each is a JSON object
