from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")
