"""Text to token ids and back, without torch. The coordinator's; workers only ever see ids."""

from __future__ import annotations

import codecs
import functools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import tokenizers
from transformers import PreTrainedTokenizerFast

from splitserve.errors import ConfigError, InvalidRequestError, ModelNotFoundError

Message = Mapping[str, Any]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from several threads.

    Raises ModelNotFoundError when tokenizer.json is missing, ConfigError when it can't be used.
    """

    def __init__(self, directory: Path | str) -> None:
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ModelNotFoundError(f"{directory} lacks tokenizer.json")
        try:
            self._wrapper = PreTrainedTokenizerFast.from_pretrained(directory)
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise ConfigError(f"{path}: {error}") from error
        self._fast: tokenizers.Tokenizer = self._wrapper.backend_tokenizer
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = {i: t.content for i, t in added.items() if t.special}
        self._ids_of_special = {content: i for i, content in self._special_ids.items()}
        self._bos_id: int | None = self._wrapper.bos_token_id
        self._bytes_of = _TokenBytes(self._fast, path)
        self._literal_lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """How many ids the tokenizer knows; the model's vocabulary may be larger."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._wrapper.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with what the model's own post-processor adds (often nothing).

        Control tokens written out in the text become control tokens: a raw prompt is trusted, as
        in every completions API. A text that itself begins with BOS gets no second one, so that a
        rendered chat sent as a raw prompt has the chat's ids.
        """
        ids = _encode(self._fast, text)
        if len(ids) > 1 and ids[0] == ids[1] == self._bos_id and self._adds_bos:
            return ids[1:]
        return ids

    @functools.cached_property
    def _adds_bos(self) -> bool:
        return self._fast.encode("").ids[:1] == [self._bos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        The template alone may write control tokens (and BOS). One that a message spells out, say
        `<|im_end|>`, is encoded as the characters it is made of: no user can forge a turn.
        Raises InvalidRequestError when the model has no template, or the template refuses.
        """
        mark = _unused_character(messages)
        special = _alternatives(self._ids_of_special)
        escaped = _map_text(messages, lambda text: special.sub(_marked(mark), text))
        text = self._render(escaped)
        if mark not in text:
            return _encode(self._fast, text, add_special_tokens=False)
        return self._encode_marked(text, mark, special)

    def _render(self, messages: Any) -> str:
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        if not messages:
            raise InvalidRequestError("messages is empty", param="messages")
        try:
            rendered = self._wrapper.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _encode_marked(self, text: str, mark: str, special: re.Pattern[str]) -> list[int]:
        """Encodes piece by piece: special tokens by id, everything between them literally."""
        ids: list[int] = []
        position = 0
        for match in special.finditer(text):
            ids += self._encode_literally(text[position : match.start()].replace(mark, ""))
            ids.append(self._ids_of_special[match[0]])
            position = match.end()
        return ids + self._encode_literally(text[position:].replace(mark, ""))

    def _encode_literally(self, text: str) -> list[int]:
        with self._literal_lock:
            return _encode(self._literal, text, add_special_tokens=False)

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer to which a control token's name is mere text."""
        copy = tokenizers.Tokenizer.from_str(self._fast.to_str())
        copy.encode_special_tokens = True
        return copy

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token stands for, of a special one its name; empty for an unknown id."""
        special = self._special_ids.get(token_id)
        return self._bytes_of[token_id] if special is None else special.encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, as OpenAI's logprobs show it; U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def answer_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to an answer: none for a special one."""
        return b"" if token_id in self._special_ids else self._bytes_of[token_id]


class IncrementalDetokenizer:
    """Turns the tokens of one answer to text as they come, each in constant time.

    All pushes and the flush together are `Tokenizer.decode` of all ids (SentencePiece models
    aside: an answer keeps the space before its first word, which decode drops). A character whose
    bytes are not all there yet is held back: U+FFFD comes only for bytes that can't become one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Python replaces ill-formed bytes as Unicode recommends (one U+FFFD for each maximal
        # subpart), which is what the tokenizers library does too.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; may be empty."""
        return self._decoder.decode(self._tokenizer.answer_bytes(token_id))

    def flush(self) -> str:
        """What was held back at the end of the answer: nothing, or U+FFFD for cut characters."""
        return self._decoder.decode(b"", final=True)


class _TokenBytes(dict[int, bytes]):
    """token id → the bytes it stands for, found by what kind of decoder the tokenizer has."""

    def __init__(self, fast: tokenizers.Tokenizer, path: Path) -> None:
        super().__init__()
        self._fast = fast
        self._kind = _decoder_kind(json.loads(fast.to_str())["decoder"], path)

    def __missing__(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        value = self[token_id] = b"" if token is None else self._convert(token)
        return value

    def _convert(self, token: str) -> bytes:
        if self._kind == "byte_level":
            try:
                return bytes(_BYTE_OF_CHARACTER[c] for c in token)
            except KeyError:  # an added token: stands for itself
                return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


def _decoder_kind(decoder: Any, path: Path) -> Literal["byte_level", "sentencepiece"]:
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return "byte_level"
    if kinds == {"Metaspace"} or {"ByteFallback", "Fuse"} <= kinds:
        return "sentencepiece"
    raise ConfigError(f"{path}: decoder {sorted(map(str, kinds))} is not supported")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


# -- control tokens in users' text ------------------------------------------------------------


def _alternatives(words: Iterable[str]) -> re.Pattern[str]:
    # Longest first, so that no word hides a longer one it begins.
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _marked(mark: str) -> Any:
    return lambda match: match[0][:1] + mark + match[0][1:]


def _unused_character(messages: Sequence[Message]) -> str:
    """A private-use character that no message contains, to mark what must stay plain text."""
    used: set[str] = set()
    _map_text(messages, lambda text: used.update(text) or text)  # type: ignore[func-returns-value]
    for code in range(0xF0000, 0xFFFFE):
        if chr(code) not in used:
            return chr(code)
    raise InvalidRequestError("messages use every private-use character", param="messages")


def _map_text(value: Any, change: Any) -> Any:
    """`value` (parsed JSON) with `change` applied to each string in it, except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_text(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_text(item, change) for item in value]
    return value


def _encode(fast: tokenizers.Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text. As a batch of one, since only that call lets other threads run meanwhile."""
    (encoding,) = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)
