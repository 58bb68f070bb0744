"""Faults put into production's layouts: each is found by the check that it names, and is gone again afterwards."""

import pytest
import torch

from equivalence.checks.cuts import context_parallel
from equivalence.errors import SuiteError
from equivalence.mutants import layout_faults, layout_matrix
from equivalence.mutants.layout_faults import LAYOUT_MUTANTS
from equivalence.mutants.layout_matrix import CHECKS_OF_LAYOUTS, layout_kill_matrix
from equivalence.mutants.layout_mutant import LayoutMutant
from equivalence.mutants.matrix import Kills, failures
from equivalence.mutants.patches import replaced
from equivalence.mutants.row_faults import ROW_MUTANTS
from equivalence.runner.counters import MODEL_CHECKS
from equivalence.runner.plan import LAYOUT_CHECKS
from production import loss
from production.parallel import context_parallel as cut
from production.parallel import microbatches, multi_token_feed

ON_DATA = [mutant for mutant in LAYOUT_MUTANTS if mutant.first in LAYOUT_CHECKS]
BETWEEN_RANKS = [mutant for mutant in LAYOUT_MUTANTS if mutant.first in MODEL_CHECKS]


def found_by_its_check(mutant):
    (kills,) = layout_kill_matrix([mutant], first_only=True)
    assert failures([kills], checks=()) == []
    assert kills.found[mutant.first], kills.found


@pytest.mark.parametrize("mutant", ON_DATA, ids=lambda mutant: mutant.name)
def test_a_fault_is_found_on_data(mutant):
    found_by_its_check(mutant)


@pytest.mark.worlds
@pytest.mark.parametrize("mutant", BETWEEN_RANKS, ids=lambda mutant: mutant.name)
def test_a_fault_between_ranks_is_found_in_a_world_of_its_layout(mutant):
    found_by_its_check(mutant)


def test_every_check_of_layouts_is_the_first_of_some_fault():
    assert {mutant.first for mutant in LAYOUT_MUTANTS} == set(CHECKS_OF_LAYOUTS)
    names = [mutant.name for mutant in (*LAYOUT_MUTANTS, *ROW_MUTANTS)]
    assert len(set(names)) == len(names)
    assert len(LAYOUT_MUTANTS) >= 15


def test_an_idle_check_of_layouts_is_a_failure():
    found = dict.fromkeys(CHECKS_OF_LAYOUTS, 1) | {"leaks": 0, "order": None}
    kills = Kills(mutant="some", story="", found=found)
    wrong = failures([kills], checks=CHECKS_OF_LAYOUTS)
    assert wrong == ["the check order finds no fault", "the check leaks finds no fault"]


def put_in(monkeypatch, **fields):
    """A fault of this test's own, under the name `own`."""
    usual = {"story": "", "target": "production.loss:ONLINE_EPSILON", "wrong": lambda sound: sound, "first": "packing"}
    own = LayoutMutant(name="own", **(usual | fields))
    monkeypatch.setattr(layout_faults, "LAYOUT_MUTANTS", (own,))
    return own


def test_production_without_a_fault_survives(monkeypatch):
    monkeypatch.setattr(layout_matrix, "LAYOUT_CHECKS", ("packing", "dp_sharding"))
    monkeypatch.setattr(layout_matrix, "_in_steps", lambda *_, **__: {})
    (kills,) = layout_kill_matrix([put_in(monkeypatch)])
    assert kills.survives
    assert (kills.found["packing"], kills.found["dp_sharding"]) == (0, 0)


def raises(_):
    def broken(*_, **__):
        raise TypeError("the fault itself is wrong")

    return broken


def test_a_fault_that_cannot_run_is_no_kill(monkeypatch):
    own = put_in(monkeypatch, target="production.online.packing:take_rank", wrong=raises)
    with pytest.raises(SuiteError, match=r"fault own could not run in packing: .*the fault itself is wrong"):
        list(layout_kill_matrix([own]))


@pytest.mark.worlds
def test_a_fault_that_cannot_run_on_a_rank_is_no_kill(monkeypatch):
    own = put_in(monkeypatch, target="production.training.step:wrap", wrong=raises, first="models")
    with pytest.raises(SuiteError, match=r"fault own could not run: .*TypeError"):
        list(layout_kill_matrix([own], first_only=True))


def test_a_fault_is_active_wherever_its_target_was_imported_and_undone_after_an_error():
    sound = cut.shard_tensors

    def fails():
        with replaced("production.parallel.context_parallel:shard_tensors", lambda _: dict):
            assert cut.shard_tensors is microbatches.shard_tensors is dict
            assert context_parallel.production.shard_tensors is dict
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert cut.shard_tensors is microbatches.shard_tensors is sound


def test_a_property_and_a_table_of_names_are_put_back():
    mask, table = multi_token_feed.DepthFeed.loss_mask, cut.LAYOUTS
    with (
        replaced(
            "production.parallel.multi_token_feed:DepthFeed.loss_mask", lambda _: property(lambda _: torch.zeros(1))
        ),
        replaced("production.parallel.context_parallel:LAYOUTS", lambda _: {}),
    ):
        assert multi_token_feed.DepthFeed.loss_mask is not mask
        assert cut.LAYOUTS == {}
    assert multi_token_feed.DepthFeed.loss_mask is mask
    assert cut.LAYOUTS is table


@pytest.mark.parametrize("mutant", LAYOUT_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_replaces_something_and_leaves_nothing_behind(mutant):
    before = {name: value for module in (cut, loss, microbatches) for name, value in vars(module).items()}
    with mutant.entered():
        pass
    assert {name: value for module in (cut, loss, microbatches) for name, value in vars(module).items()} == before


def test_an_unknown_fault_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="no fault is called 'nothing'; choose one of owner_off_by_one"):
        layout_faults.find("nothing")
