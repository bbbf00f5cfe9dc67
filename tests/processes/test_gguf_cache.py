"""A GGUF that is given for a model is converted by a process of its own, into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.models import cache_dir, model_facts, resolve_model
from splitserve.tokenizer import Tokenizer
from tests.tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID
from tests.unit.gguf_files import write_gguf
from tests.unit.test_gguf_conversion import assert_same_weights


def test_a_file_resolves_to_the_cache_and_the_second_time_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf_file = write_gguf(model, tmp_path / "tiny.gguf", "llama", CHAT_TEMPLATE)
    resolved = resolve_model(str(gguf_file))
    assert resolved.directory.parent == cache_dir()
    assert_same_weights(resolved.directory, model)
    assert model_facts(resolved.directory).eos_token_ids == (EOS_ID,)
    assert model_facts(resolved.directory).bos_token_id == BOS_ID
    tokenizer = Tokenizer(resolved.directory)
    assert tokenizer.encode("ab é") == [255, 32, 0xC3, 0xA9]
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) > 10
    written = resolved.directory.stat().st_ctime_ns
    renamed = gguf_file.rename(gguf_file.with_name("other.gguf"))
    assert resolve_model(str(renamed)).directory == resolved.directory
    assert resolved.directory.stat().st_ctime_ns == written
