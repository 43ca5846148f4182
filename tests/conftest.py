"""Fixtures shared by all tests: tiny models on disk."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_helper(name: str, path: Path) -> ModuleType:
    """Tests are no package (import-mode=importlib), so helper modules are loaded by path, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


tiny_models = _load_helper("tiny_models", Path(__file__).parent / "engine" / "tiny_models.py")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Qwen3: 10 tokens, 2 layers, tied embeddings."""
    return str(tiny_models.save(tiny_models.make_qwen3(), tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random Llama: 10 tokens, 2 layers, separate output embeddings."""
    return str(tiny_models.save(tiny_models.make_llama(), tmp_path_factory.mktemp("llama")))
