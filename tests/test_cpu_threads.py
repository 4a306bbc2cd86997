"""Whatever number of threads the runtime gives a pass, it ends with the same bits; two threads may run passes
at once in every threading layer; and a forked process is told what happened.

Each case runs in a process of its own, since what fails here hangs or ends the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cpu.cores import usable_cores
from tests.odd_models import digest

TWO = {"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}


def run(
    code: str, environment: dict[str, str] | None = None, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = environment or {**os.environ, **TWO, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parent.parent, capture_output=True,
        text=True, timeout=timeout,
    )  # fmt: skip


FEWER = """
import numba
from paceline.cpu import pass_memory
from tests.odd_models import digest
print(digest("int8"))
pass_memory.num_threads = lambda: 2  # asked for by every pass, as before,
numba.set_num_threads(1)  # but from now on the runtime gives one
print(digest("int8"))
numba.set_num_threads(2)
print(digest("int8"))
"""


def test_a_pass_that_is_given_fewer_threads_than_before_ends_with_the_same_bits() -> None:
    done = run(FEWER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest("int8")] * 3
    assert done.stderr.count("threads were asked for, fewer run at once") == 1, "it is said once"


@pytest.mark.parametrize("variables", [{"OMP_DYNAMIC": "true"}, {"OMP_THREAD_LIMIT": "1"}])
def test_limits_of_the_runtime_change_no_bit(variables: dict[str, str]) -> None:
    done = run("from tests.odd_models import digest; print(digest('int8'))", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest("int8")]
    if "OMP_THREAD_LIMIT" in variables:
        assert "OMP_THREAD_LIMIT" in done.stderr


TOGETHER = """
from threading import Thread
from paceline.cpu.decoder import CpuDecoder
from tests.laws.harness import RandomCheckpoint
from tests.odd_models import ODD, logits_of
models = [CpuDecoder.load(RandomCheckpoint(ODD), dtype="int8", use_cache=False) for _ in range(2)]
wanted, found = logits_of(models[0]), []
def work(model):
    for _ in range(20):
        found.append(bool((logits_of(model) == wanted).all()))
threads = [Thread(target=work, args=(model,)) for model in models]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found.count(True))
"""


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_two_models_run_in_two_threads(layer: str) -> None:
    done = run(TOGETHER, NUMBA_THREADING_LAYER=layer)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["40"]


# Everything but the pass is made before the fork: torch's own threads do not survive it either.
FORKED = """
import os
from paceline.core.errors import ConfigError
from tests.odd_models import odd_model
from tests.passes import Rows, batch_of, new_kv, shuffled_blocks
model = odd_model("int8")
kv, batch = new_kv(model), batch_of([Rows([1, 2, 3], shuffled_blocks(2)[0], 0)])
model.forward(batch, kv)
child = os.fork()
if not child:
    try:
        model.forward(batch, kv)
    except ConfigError as error:
        print(error, flush=True)
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told_what_happened_and_what_to_do() -> None:
    done = run(FORKED)
    assert done.returncode == 0, done.stderr
    message, status = done.stdout.strip().rsplit("\n", 1)
    assert "forked" in message
    assert "spawn" in message
    assert status == "7"


def test_threads_are_no_more_than_the_cores_that_may_be_used() -> None:
    """More would wait for each other's turns: sixteen on two cores ran at a sixth of two threads' speed."""
    code = "from paceline.cpu.sync import num_threads; print(num_threads())"
    cores = len(os.sched_getaffinity(0))
    done = run(code, NUMBA_NUM_THREADS="64", OMP_NUM_THREADS="64")
    assert done.stdout.split() == [str(cores)], done.stderr
    alone = {name: value for name, value in os.environ.items() if name != "NUMBA_NUM_THREADS"}
    for asked, found in (("1", "1"), ("1,1", "1"), ("64", str(cores))):
        done = run(code, {**alone, "OMP_NUM_THREADS": asked})
        assert done.stdout.split() == [found], (asked, done.stderr)
    done = run(f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); {code}")
    assert done.stdout.split() == ["1"], done.stderr


@pytest.mark.parametrize(
    ("own", "limits", "cores"),
    [
        ("0::/a/b\n", {"cpu.max": "max 100000"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000", "a/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("2:cpu,cpuacct:/a\n0::/\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 4),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("nothing that is known\n", {}, 8),
    ],
)  # fmt: skip
def test_control_groups_and_siblings_limit_the_cores(
    own: str, limits: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    files = {f"groups/{name}": text for name, text in limits.items()} | {"own": own}
    files |= {f"cpus/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, folder in {"GROUPS": "groups", "OWN_GROUPS": "own", "CPUS": "cpus"}.items():
        monkeypatch.setattr(f"paceline.cpu.cores.{name}", tmp_path / folder)
    assert usable_cores(count_siblings=True) == cores
    assert usable_cores(count_siblings=False) == min(cores, 4)
