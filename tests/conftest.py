"""How the suite runs anywhere: one thread a worker, no deadline, no hub, and no witness that is quietly left out."""

import os

# Before torch and tokenizers are imported: workers share the cores, and no test may wait for a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

pytest_plugins = ["pytester"]  # for the plugin of subject/

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


def pytest_addoption(parser):
    parser.addoption(
        "--every-layout", action="store_true", help="hold every layout of four ranks to Megatron-LM's pieces, not some"
    )


def pytest_collection_modifyitems(config, items):
    """Put the files that open worlds first, and deselect what needs a GPU where there is none; the summary says so.

    Workers take whole files (`--dist loadfile`), so that what a file sets up is set up once; a long file at the end would leave
    the other workers with nothing to do.
    """
    long = {item.path for item in items if item.get_closest_marker("worlds")}
    items.sort(key=lambda item: item.path not in long)
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A skipped test is a witness that did not speak: the run fails."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device here: tests marked gpu are deselected, none has run")
    if terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("a skipped test is a failure here: a witness did not speak", red=True)
