"""What several files of tests share."""

import signal
import warnings

import micro
import pytest
import torch
from chromium import chromium  # noqa: F401
from website import site  # noqa: F401

# A shell starts what it puts in the background with Ctrl-C ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def exact(monkeypatch):
    """One thread, quiet, and a micro model that normalises in its own precision."""
    micro.whole_precision(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Data sets are kept in a cache of the test's own, and no hub is asked."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
