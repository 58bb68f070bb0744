"""R-SETUP-23: a job that names a certificate starts only as the job that was checked."""

import json

import pytest
import training_job_worlds as jobs

from production.training.certificate import FORMAT, fingerprints, without_certificate
from production.training.config import load
from production.training.data.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def test_a_run_starts_with_its_certificate_and_is_refused_after_a_changed_byte(world, tmp_path):
    """R-SETUP-23."""
    data = jobs.write_rows(tmp_path / "rows.jsonl")
    config = str(jobs.write_job(tmp_path / "job", data, **{"sft.max_num_steps": 1}))
    job = load(config)
    held = fingerprints(job, load_tokenizer(job), 1)
    certificate = tmp_path / "check.json"
    certificate.write_text(json.dumps({"format": FORMAT, "verdict": "proven", "fingerprints": held}))
    named = {"config": config, "overrides": [f"data.certificate={certificate}"]}
    assert "reason" in world(1, "train", named)[0]
    changed = bytearray(data.read_bytes())
    at = changed.index(b'"content": "', 100) + 13
    changed[at] = ord("x") if changed[at] != ord("x") else ord("y")
    data.write_bytes(changed)
    outcome = world(1, "train", named)[0]
    assert outcome["kind"] == "SetupRefused"
    assert "rows.jsonl" in outcome["refused"]
    assert "were checked, now" in outcome["refused"]


def test_a_job_without_a_certificate_gets_one_note_how_to_make_one(tmp_path):
    config = str(jobs.write_job(tmp_path / "job", tmp_path / "rows.jsonl"))
    (told,) = without_certificate(load(config, ["sft.seed=5"]), 4)
    assert f"packproof check {config} sft.seed=5 --world-size 4 --out check compares" in told
    named = load(str(tmp_path / "job" / "job.yaml"), ["data.certificate=check.json"])
    assert without_certificate(named, 1) == []
