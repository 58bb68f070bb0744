"""The list of peers, their adapters, and the record of what was measured, which the page's tables are made from."""

import ast
import json
import runpy
import shlex
import sys

import pytest

from packproof.cases import drawn_cases, load_vectors
from packproof.conventions import declare
from packproof.judging import conformance_of
from packproof.levels import NAMES
from packproof.report import as_json
from tools.peers import __main__ as command
from tools.peers import results
from tools.peers.environment import ADAPTERS, Peer, UnavailableError, build, read_peers

PEERS, SHARED = read_peers()
WITH_ADAPTER = [peer for peer in PEERS if peer.adapter]
EXAMPLE = "plain_packer.py"
IMPORTED = {
    "automodel_packed.py": "nemo_automodel",
    "axolotl_multipack.py": "axolotl",
    "bridge_packed.py": "megatron.bridge",
    "llamafactory_packed.py": "llamafactory",
    "nemo_packed.py": "nemo",
    "swift_packing.py": "swift",
    "torchtune_packed.py": "torchtune",
    "transformers_flattening.py": "transformers",
    "trl_bfd.py": "trl",
    "verl_engine.py": "verl",
}


def test_each_adapter_is_a_peer_and_each_peer_has_its_adapter():
    assert sorted(peer.adapter for peer in WITH_ADAPTER) == sorted(
        file.name for file in ADAPTERS.glob("*.py") if file.name != EXAMPLE
    )
    assert sorted(IMPORTED) == sorted(peer.adapter for peer in WITH_ADAPTER)
    assert all(bool(peer.adapter) != bool(peer.subject) for peer in PEERS)


@pytest.mark.parametrize("peer", WITH_ADAPTER, ids=lambda peer: peer.name)
def test_every_package_that_makes_a_row_has_a_version(peer):
    assert peer.packages
    assert [each for each in peer.packages if "==" not in each] == []


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_an_adapter_imports_its_peer_only_where_a_row_is_built(name):
    tree = ast.parse((ADAPTERS / name).read_text(encoding="utf-8"))
    imported = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {each.split(".")[0] for each in imported} <= sys.stdlib_module_names
    declare(runpy.run_path(str(ADAPTERS / name))["CONVENTIONS"])


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_an_adapter_without_its_peer_names_what_is_missing(name, monkeypatch):
    """ImportError goes through the judge, so that a peer that is not there is never taken for one that refuses."""
    adapter = runpy.run_path(str(ADAPTERS / name))
    monkeypatch.setitem(sys.modules, IMPORTED[name], None)
    if name == "verl_engine.py":
        monkeypatch.setitem(sys.modules, "verl.workers.utils.losses", None)
    with pytest.raises(ImportError, match=IMPORTED[name].split(".")[-1]):
        adapter["pack"]([{"tokens": [12, 13], "trained": [1, 1]}], 4, 0, 2, 1)


def test_the_record_has_every_peer_and_the_page_has_the_record():
    recorded = results.read_record()
    assert list(recorded) == sorted(recorded)
    assert set(recorded) == {peer.name for peer in PEERS}
    tables = results.PAGE.read_text(encoding="utf-8").partition(results.BEGIN + "\n")[2].partition(results.END)[0]
    assert tables == results.table(PEERS, recorded)


@pytest.mark.parametrize("peer", WITH_ADAPTER, ids=lambda peer: peer.name)
def test_the_record_is_of_the_conventions_that_the_adapter_declares(peer):
    found = results.read_record()[peer.name]
    assert found["declared"] == runpy.run_path(str(ADAPTERS / peer.adapter))["CONVENTIONS"]
    assert found["undeclared"] == {}
    assert list(found["levels"]) == sorted(NAMES)


def measured(name):
    adapter = runpy.run_path(str(ADAPTERS / name))
    cases = [*load_vectors(), *drawn_cases(command.DRAWN)]
    report = conformance_of(adapter["pack"], cases, subject=name, conventions=adapter["CONVENTIONS"], smallest=False)
    return results.result_of(json.loads(as_json(report, "L10", [])), "2026-12-01")


def test_transformers_is_measured_here_as_it_is_recorded():
    found = measured("transformers_flattening.py")
    assert results.changes(results.read_record()["transformers"], found) == []
    found["levels"]["L3"].update(result="no", missed=3)
    assert [each[:14] for each in results.changes(results.read_record()["transformers"], found)] == ["L3 is no (3 of"]
    assert results.changes(None, found) == ["nothing is recorded of it"]


def test_a_peer_whose_python_is_not_there_cannot_be_installed(tmp_path):
    with pytest.raises(UnavailableError, match=r"needs Python 2\.1, which is neither on PATH"):
        build(Peer(name="old", title="old", adapter="old.py", pythons=["2.1"]), tmp_path, SHARED)


def test_a_package_that_is_not_there_cannot_be_installed_and_is_tried_again(tmp_path):
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    peer = Peer(
        name="lost", title="lost", adapter="l.py", pythons=[here], packages=[str(tmp_path / "no-1-py3-none-any.whl")]
    )
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"no-1-py3-none-any\.whl"):
            build(peer, tmp_path, SHARED)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with a peer that `measure` measures, and return its exit status and screen."""
    peer = Peer(name="transformers", title="transformers", subject="reference")
    monkeypatch.setattr(command, "read_peers", lambda: ([peer], []))

    def go(measure):
        monkeypatch.setattr(command, "_report", lambda *_: measure())
        return command.main([]), capsys.readouterr().out

    return go


def test_only_a_changed_or_broken_peer_fails_the_command(run):
    def raises(error):
        raise error

    recorded = results.read_record()["transformers"]
    other = json.loads(json.dumps(recorded))
    other["levels"]["L1"]["missed"] += 1
    assert (run(lambda: recorded)[0], run(lambda: other)[0]) == (0, 1)
    status, screen = run(lambda: raises(UnavailableError("no wheel")))
    assert (status, screen.splitlines()[0]) == (0, "transformers: cannot be installed here: no wheel")
    status, screen = run(lambda: raises(command.BrokenError("it hangs")))
    assert (status, screen.splitlines()[0]) == (1, "transformers: BROKEN: it hangs")
    assert "changed or broken: transformers" in run(lambda: other)[1]


def test_an_unknown_peer_is_bad_input(capsys):
    assert command.main(["verk"]) == 2
    assert "no peer is called verk; known are megatron-lm, ms-swift" in capsys.readouterr().err


def test_a_page_without_markers_is_not_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="must have the lines <!-- peers: begin -->"):
        results.write_page(PEERS, {}, page)


def test_a_peer_may_lie_in_a_folder_whose_name_has_spaces_and_quotes(tmp_path):
    python = tmp_path / "it's a folder" / "python"
    words = shlex.split(command._command(python, Peer(name="a", title="", adapter="b.py")).removeprefix("exec:"))
    assert words == ["env", "-u", "PYTHONPATH", str(python), str(ADAPTERS / "b.py")]


@pytest.mark.parametrize("below", ["", "peers"])
def test_a_folder_that_cannot_be_made_is_bad_input_and_no_missing_peer(below, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command.main(["transformers", "--folder", str(tmp_path / "file" / below)]) == 2
    assert "--folder must be a folder" in capsys.readouterr().err
