"""inspect and pack on a Ray cluster of two nodes that loses workers and nodes in the middle: the result is that of one process."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tools import ray_pool

os.environ.update(ray_pool.QUIET | ray_pool.LOOPBACK)  # which Ray reads when it is imported
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's spelling; else its processes wait for all other tests

import ray
from ray.cluster_utils import Cluster

from production.errors import BadInput, PackproofError
from production.rows.builder import RowSettings
from tools.engine import open_pool
from tools.inspect_rows import scan as scanning
from tools.inspect_rows.__main__ import main as inspect
from tools.inspect_rows.scan import scan
from tools.pack_rows import PackSettings, inputs, main, pack_files
from tools.pack_rows.output import write_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
MINI = EXAMPLES / "tokenizers" / "nemotron-mini"
CHAT = EXAMPLES / "chat" / "sample.jsonl"
PACKED = EXAMPLES / "packed" / "sample.jsonl.packed"
STORE = 80 << 20
LOST_EARLY = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000}
"""A node whose port is closed is given up after seconds, and one that is only slow is not."""
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # this file is no module on a node


def _start(make):
    """Start a node: Ray gives up after 30 s, which are not enough on a machine that is busy with other tests."""
    for left in (2, 1, 0):
        try:
            return make()
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="pp-ray-"))
    (folder / "ray").mkdir()
    node = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": LOST_EARLY}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        patch.setenv("RAY_TMPDIR", str(folder))
        cluster = _start(lambda: Cluster(initialize_head=True, head_node_args=node))
        stack.callback(cluster.shutdown)
        patch.setenv("RAY_ADDRESS", cluster.address)
        assert stack.enter_context(open_pool("ray", None)).workers == 1
        yield cluster


@pytest.fixture
def second(cluster):
    """A second node, for one test."""
    node = _start(lambda: cluster.add_node(num_cpus=1, object_store_memory=STORE))
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def pool(cluster, second):
    with open_pool("ray", None) as pool:  # the connection that is there
        assert second in cluster.worker_nodes
        assert pool.workers == 2
        yield pool


class Losing:
    """A pool whose function loses its process, and its node, in the middle of a task, once each."""

    def __init__(self, pool, folder, node):
        self.pool, self.folder, self.node = pool, folder, node
        self.workers = pool.workers

    def run(self, function, tasks):
        folder, node = self.folder, self.node.node_id

        def lose(task):
            here = ray.get_runtime_context().get_node_id()
            first = here != node
            mine, other = (folder / "worker", folder / "node") if first else (folder / "node", folder / "worker")
            if _begins(mine):
                if not first:
                    os.kill(os.getppid(), signal.SIGKILL)  # all that makes up a node
                os.kill(os.getpid(), signal.SIGKILL)
            _until(other.exists)  # no node runs all tasks before the other has begun one
            with (folder / "done").open("a") as done:
                done.write(f"{here}\n")
            return function(task)

        return self.pool.run(lose, tasks)

    def check(self):
        """Both losses did occur, and every task ended on the node that was left."""
        assert {each.name for each in self.folder.iterdir()} == {"worker", "node", "done"}
        assert self.node.node_id not in (self.folder / "done").read_text()


def _begins(path):
    with contextlib.suppress(FileExistsError):
        path.touch(exist_ok=False)
        return True
    return False


def _until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def without_time(found):
    return {key: value for key, value in found.to_json().items() if key not in ("seconds", "processes")}


def test_an_inspection_that_loses_a_worker_and_a_node_finds_what_one_process_finds(
    tmp_path, pool, second, monkeypatch, capfd
):
    monkeypatch.setattr(scanning, "MOST_ROWS", 16)
    settings = RowSettings(pack_length=2048)
    ways = {"alone": {"processes": 1}, "cluster": {"pool": Losing(pool, tmp_path, second)}}
    found, told = {}, {}
    for name, way in ways.items():
        findings, copies = [], []
        found[name] = without_time(
            scan([PACKED], MINI, settings, on_finding=findings.append, on_redundant=copies.append, **way)
        )
        told[name] = findings, copies[0].tolist()
    ways["cluster"]["pool"].check()
    assert found["cluster"] == found["alone"]
    assert told["cluster"] == told["alone"]
    assert found["alone"]["counts"]["rows"] > 100
    assert len(told["alone"][0]) > 10
    time.sleep(1)  # Ray's words come by another thread
    assert capfd.readouterr().out == ""


def test_a_packing_that_loses_a_worker_and_a_node_writes_the_bytes_of_one_process(tmp_path, pool, second, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_LINES", 8)
    settings = PackSettings(prompt_format="nemotron-nano-v2", pack_length=256, on_bad="skip", on_long="split")
    (lost := tmp_path / "lost").mkdir()
    losing = Losing(pool, lost, second)
    written = []
    for way in ({"processes": 1}, {"pool": losing}):
        packing = pack_files([CHAT], MINI, settings, **way)
        written.append([path.read_bytes() for path in write_rows(packing, tmp_path / "out.packed")])
        packing.spool.remove()
    losing.check()
    assert written[0] == written[1]
    assert written[0][0].count(b"\n") > 5


def test_results_that_were_lost_with_a_node_are_made_again_and_taken_once(tmp_path, cluster, second, pool):
    """Large results lie in the memory of the node that made them; it ends before they are fetched."""
    node = second.node_id

    def task(number):
        if ray.get_runtime_context().get_node_id() == node:
            (tmp_path / "began").touch()
        _until((tmp_path / "began").exists)  # the first node does not run all of them
        return number, number.to_bytes(2, "little") * 100_000

    results = pool.run(task, range(12))
    taken = [next(results)]
    time.sleep(0.5)  # the task ends
    cluster.remove_node(second, allow_graceful=False)
    taken += results
    assert taken == [(number, (number, number.to_bytes(2, "little") * 100_000)) for number in range(12)]


def test_the_commands_write_on_a_cluster_what_they_write_alone(tmp_path, cluster, capsys):
    told, files = [], []
    # No fork beside a live connection, whose threads would not be in the child.
    for engine in (["--engine", "processes", "--processes", "1"], ["--engine", "ray"]):
        status = inspect([str(PACKED), "--tokenizer", str(MINI), "--json", *engine])
        assert status == 1
        said = capsys.readouterr()
        lines = said.err.splitlines()
        told.append({key: value for key, value in json.loads(said.out).items() if key not in ("seconds", "processes")})
        out = tmp_path / engine[1] / "out.packed"
        assert main([str(CHAT), "--tokenizer", str(MINI), "--pack-length", "256", "--on-long", "skip", "--on-bad", "skip", "--out", str(out), *engine]) == 0  # fmt: skip
        capsys.readouterr()
        files.append((out.read_bytes(), out.with_name("out.packed.manifest.json").read_bytes()))
    assert lines == [f"ray: 1 core on 1 node of {cluster.address}"]
    assert told[0] == told[1]
    assert files[0] == files[1]


@pytest.mark.usefixtures("cluster")
def test_errors_of_a_row_come_back_in_their_own_class():
    def fail(_):
        raise BadInput(kind="file_changed", what="it changed", fix="wait", file="rows.jsonl")

    with open_pool("ray", None) as pool, pytest.raises(BadInput, match=r"^rows\.jsonl: it changed\. To fix it: wait$"):
        list(pool.run(fail, [0]))


@pytest.mark.usefixtures("cluster")
def test_a_task_that_ends_every_process_ends_the_command(monkeypatch):
    monkeypatch.setattr(ray_pool, "RETRIES", 1)
    lost = "a task was lost 2 times with its process or node .* give the nodes more memory"
    with open_pool("ray", None) as pool, pytest.raises(PackproofError, match=lost):
        list(pool.run(lambda _: os._exit(1), [0]))


@pytest.mark.usefixtures("cluster")
def test_a_node_with_other_code_is_refused(monkeypatch):
    monkeypatch.setattr(ray_pool, "code_in_use", lambda: "of another version")
    other = "is another version than where the command was started"
    with open_pool("ray", None) as pool, pytest.raises(PackproofError, match=other):
        list(pool.run(abs, [0]))


def test_a_cluster_of_this_machine_is_started_in_silence_and_leaves_nothing(tmp_path):
    out = tmp_path / "out.packed"
    given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    (scratch := Path(tempfile.mkdtemp(prefix="pp-"))).mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tools.pack_rows", CHAT, "--tokenizer", MINI, "--pack-length", "256", "--on-long", "skip", "--on-bad", "skip", "--out", out, "--engine", "ray", "--processes", "1", "--list-refused", "0"],
            env=given | {"TMPDIR": str(scratch)}, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode, list(scratch.iterdir())) == (0, [])
    finally:
        shutil.rmtree(scratch)
    first, *rest = done.stderr.splitlines()
    assert first == "ray: 1 core on 1 node of this machine, since RAY_ADDRESS names no cluster"
    assert all("--list-refused" in line for line in rest)
    assert done.stdout.lstrip().startswith("packed rows")
    assert not any(str(scratch) in " ".join(_command(each)) for each in psutil.process_iter())


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("command", ["inspect", "pack"])
def test_without_ray_the_engine_is_refused_with_the_command_that_installs_it(tmp_path, capsys, monkeypatch, command):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    given = [str(PACKED if command == "inspect" else CHAT), "--tokenizer", str(MINI), "--engine", "ray"]
    if command == "inspect":
        status = inspect(given)
    else:
        status = main([*given, "--pack-length", "256", "--out", str(tmp_path / "out")])
    assert status == 2
    assert capsys.readouterr().err == f"packproof {command}: --engine ray: Ray is not installed. To fix it: install it with python -m pip install 'packproof[ray]'\n"  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_the_commands_import_ray_only_where_it_is_asked_for():
    program = "import sys; import tools.inspect_rows.__main__, tools.pack_rows; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES.parent, check=True)


@pytest.mark.parametrize(
    ("address", "processes", "told"),
    [
        ("ray://host:10001", None, "addresses of Ray's client are not taken"),
        ("127.0.0.1:9", None, "no cluster answers there"),
        ("nowhere", None, "no cluster answers there"),
        ("127.0.0.1:9", 2, "leave --processes out"),
        ("", 0, "processes: 0 processes"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_reported(monkeypatch, address, processes, told):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PackproofError, match=told), open_pool("ray", processes):
        pass
