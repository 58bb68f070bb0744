"""An error that a library raises again in its own class, with a text of its own, still says what, where and how to fix it."""

import pickle

import pytest

from production.errors import BatchRefused, PackproofError
from production.training.checkpoint.manager import CheckpointFailed
from production.training.config.refusal import SetupRefused
from production.training.data.dataset import BadRow
from production.training.data.fingerprint import ResumeRefused
from production.training.data.worker_process import WorkerDied
from production.training.distributed.heartbeat import RankLost

FIELDS = {"what": "a wrong thing", "where": "row 3", "fix": "take it out"}
ALL = [
    PackproofError(**FIELDS),
    BatchRefused(kind="cu_order", row=3, **FIELDS),
    SetupRefused(kind="size", key="sft.seed", **FIELDS),
    BadRow(kind="refused", file="a.jsonl", line=4, row=3, **FIELDS),
    ResumeRefused(differing={"seed": (1, 2)}, **FIELDS),
    RankLost(**FIELDS),
    WorkerDied(**FIELDS),
    CheckpointFailed(**FIELDS),
]


def kinds(base=PackproofError):
    return {base}.union(*(kinds(each) for each in base.__subclasses__()))


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_in_a_module_that_megatron_builds_keeps_its_words_and_fields(error):
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    class Refuses:
        def __init__(self):
            raise error

    with pytest.raises(type(error)) as raised:
        build_module(ModuleSpec(module=Refuses))
    assert str(raised.value) == f"{error} when instantiating Refuses"
    assert vars(raised.value) == vars(error)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again), vars(again)) == (type(error), str(raised.value), vars(error))


def test_every_error_takes_one_text_or_all_of_its_fields():
    found = kinds()
    assert {type(each) for each in ALL} <= found
    for kind in found:
        error = kind("only a text")
        assert (type(error), str(error), error.what) == (kind, "only a text", "only a text")
        with pytest.raises(TypeError):
            kind(what="only a part")
        with pytest.raises(TypeError):
            kind()


def test_an_error_does_not_take_the_fields_of_another_handled_error():
    def fails():
        raise PackproofError(**FIELDS)

    try:
        fails()
    except PackproofError:
        error = PackproofError("of something else")
    assert (error.what, error.where, error.fix) == ("of something else", "", "")
