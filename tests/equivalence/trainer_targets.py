"""What the tests of training runs call on ranks, by name: production trained with a fault in its optimizer."""

from unittest import mock

from equivalence.trainers.production_run import train


def without_decay_groups(case, worker):
    """Weight decay touches norms too."""
    from megatron.core import optimizer

    with mock.patch.object(optimizer, "get_standard_config_overrides", return_value={}):
        return train(case, worker)


def schedule_a_step_early(case, worker):
    """The scheduler is stepped before the optimizer."""
    from production.training import engine

    own = engine._scheduler

    def scheduler(*arguments):
        made = own(*arguments)
        made.step(increment=1)
        return made

    with mock.patch.object(engine, "_scheduler", scheduler):
        return train(case, worker)
