"""A logger that cannot log in ends a job before a model is built."""

import importlib.machinery
import sys
import types
from unittest import mock

import pytest
import training_job_worlds as jobs

pytestmark = pytest.mark.worlds


class UsageError(Exception):
    """Of wandb's own kind."""


def without_a_login_or_a_model(payload, worker):
    """On a rank that can neither log in nor build a model: what each job is refused with."""

    def refuses(**_given):
        raise UsageError("No API key configured.")

    packages = {}
    for name, start in (("wandb", "init"), ("mlflow", "MlflowClient")):
        packages[name] = types.ModuleType(name)
        packages[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(packages[name]).update({start: refuses, "Settings": dict})
    with (
        mock.patch.dict(sys.modules, packages),
        mock.patch("production.training.engine.build_model", side_effect=AssertionError("a model is built")),
    ):
        return jobs.train_in_turn(payload, worker)


def test_a_logger_that_cannot_log_in_ends_a_job_before_a_model_is_built(tmp_path):
    from equivalence.workers import open_world, preload

    preload(*jobs.MODULES)
    config = jobs.write_job(tmp_path, jobs.write_rows(tmp_path / "rows.jsonl"))
    names = ("wandb", "mlflow")
    payload = [{"config": str(config), "overrides": [f"logger.{name}_enabled=true"]} for name in names]
    with open_world(1) as world:
        (found,) = world.run(f"{__name__}:without_a_login_or_a_model", payload)
    for name, each in zip(names, found, strict=True):
        assert each["refused"].startswith(
            f"logger.{name}_enabled: {name} cannot start: UsageError: No API key configured"
        )
