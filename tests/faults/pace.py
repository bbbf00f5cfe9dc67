"""How fast workers of a test may be and where they hold requests: a file that tests write.

The directory named by FAULTS_DIR has the pace, and `marks`: a line for each request that a worker
has begun to hold.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY_ENV = "FAULTS_DIR"

# The first token of a prompt that is to be held says where. Each is a byte that no text has.
PREFILLING = 0xF8  # one chunk is computed, more are to come
RESERVED = 0xF9  # granted, no frame sent
FRAMES = 0xFA  # NUM_FRAMES_BEFORE frames sent, more are to come
UNCOMMITTED = 0xFB  # every frame sent, Commit is not
COMMITTED = 0xFC  # the decode worker has all, and has not computed a token
DECODING = 0xFD  # NUM_TOKENS_BEFORE tokens are out
NAMES = {
    PREFILLING: "prefilling",
    RESERVED: "reserved",
    FRAMES: "k of n frames",
    UNCOMMITTED: "all frames, no Commit",
    COMMITTED: "committed",
    DECODING: "decoding",
}
NUM_FRAMES_BEFORE = 2
NUM_TOKENS_BEFORE = 4
FRAME_BYTES = 16 << 10  # most bytes of a frame, so that a prompt of the tiny model has several


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations are added to what the real thing takes."""

    prefill_step_s: float = 0.0  # a forward pass
    decode_step_s: float = 0.0
    schedule_s: float = 0.0  # Python that decides what to compute, in both roles
    busy: bool = False  # steps are slow because Python computes, not because it waits
    frame_s: float = 0.0  # between two frames of a transfer, on the sending side
    write_s: float = 0.0  # before a frame is verified and written, on the receiving I/O thread
    holding: bool = False  # first attempts are held where the first token of the prompt says
    poison: int = -1  # the first token of prompts over which every forward pass raises
    frozen: str = ""  # a worker_id: its forward passes never end


class PaceFile:
    """Reads and writes the pace in a directory; cheap to read again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / "pace.json"
        self._marks = directory / "marks"
        self._seen: tuple[int, int] | None = None
        self._pace = Pace()

    @classmethod
    def from_environment(cls) -> PaceFile:
        return cls(Path(os.environ[DIRECTORY_ENV]))

    def read(self) -> Pace:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return self._pace
        if (seen := (status.st_mtime_ns, status.st_ino)) != self._seen:
            self._pace = Pace(**json.loads(self._path.read_text()))
            self._seen = seen
        return self._pace

    def write(self, **changes: Any) -> Pace:
        """Change some of it; workers follow within milliseconds."""
        pace = dataclasses.replace(self.read(), **changes)
        replacement = self._path.with_suffix(".new")
        replacement.write_text(json.dumps(dataclasses.asdict(pace)))
        replacement.rename(self._path)
        return pace

    def mark(self, token_ids: Sequence[int], **place: Any) -> None:
        """Tell the test that a request is held here. One write each, so lines never mix."""
        line = json.dumps({"tag": list(token_ids[:2]), **place}) + "\n"
        descriptor = os.open(self._marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def marks(self) -> list[dict[str, Any]]:
        if not self._marks.exists():
            return []
        return [json.loads(line) for line in self._marks.read_text().splitlines()]

    def forget_marks(self) -> None:
        self._marks.unlink(missing_ok=True)
