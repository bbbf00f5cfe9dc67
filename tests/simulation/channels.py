"""A worker's channel without sockets: splitserve.wire.channel.Channel as the loops know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kv_transfer.receiver import StoreReceiver
from splitserve.wire import messages as m
from splitserve.wire.channel import DataReceived, RoomAvailable, SendFailed
from splitserve.wire.codec import decoder_for, encode
from splitserve.wire.staging import Staging
from tests.simulation.brief import brief
from tests.simulation.lanes import Lane
from tests.simulation.world import World

_NOTICED_AFTER_S = 0.05  # a closed connection, at its other end
_DECODERS: dict[Any, Any] = {
    union: decoder_for(union)
    for union in (
        m.ToCoordinator,
        m.ToWorker,
        m.ToLauncher,
        m.PrefillToDecode,
        m.DecodeToPrefill,
    )
}


def over_the_wire(message: Any, union: Any) -> Any:
    """A message as the peer gets it: what the codec does not take fails here."""
    return _DECODERS[union].decode(encode(message))


class Host(Protocol):
    """The process that a channel belongs to."""

    worker_id: str
    is_gone: bool

    def clock(self) -> float: ...

    def ready_at(self) -> float: ...

    def post(self, event: object) -> None: ...


class Parcel(NamedTuple):
    """A message of the data channel, and the frame behind it."""

    message: Any
    buffer: memoryview | None

    @property
    def num_bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes


@dataclass(slots=True)
class Noise:
    """What goes wrong with messages between workers."""

    drop_rate: float = 0.0
    spoil_rate: float = 0.0  # of frames
    repeat_rate: float = 0.0  # of messages without a frame
    frames_go_alone: bool = False  # a message may pass frames, as with other transports
    happened: Callable[[str, Any], None] = field(default=lambda *_: None)


class Link:
    """One connection of a prefill worker to a decode worker."""

    def __init__(self, source: SimChannel, target: SimChannel, identity: str) -> None:
        self.identity = identity
        self.source, self.target = source, target
        self.is_open = True
        self.seen_closed = False  # by the decode worker
        self.num_staged = 0
        world = source.network.world
        self.messages: Lane[Parcel] = Lane(world, self._came, target.host.ready_at)
        self.frames: Lane[Parcel] = Lane(world, self._came, target.host.ready_at)
        self.answers: Lane[Any] = Lane(world, self._answered, source.host.ready_at)

    def close(self, lost: bool = True) -> None:
        """The prefill worker has closed it, or is gone."""
        self.is_open = False
        if lost:
            self.messages.lose_end()
            self.frames.lose_end()
        self.answers.lose_all()
        self.source.network.world.after(_NOTICED_AFTER_S, self._notice)

    def _notice(self) -> None:
        self.seen_closed = True

    def _came(self, parcel: Parcel) -> None:
        network, host = self.source.network, self.target.host
        network.world.note(host.worker_id, "<=", self.source.host.worker_id, brief(parcel.message))
        if self.is_open:
            self.num_staged -= parcel.num_bytes
            self.source.unstage(self.target.endpoint, parcel.num_bytes)
        if parcel.buffer is None:
            host.post(DataReceived(self.identity, parcel.message, host.clock()))
        else:
            assert self.target.receiver is not None
            host.post(self.target.receiver.accept(parcel.message, parcel.buffer))

    def _answered(self, message: Any) -> None:
        host = self.source.host
        self.source.network.world.note(
            host.worker_id, "<=", self.target.host.worker_id, brief(message)
        )
        host.post(DataReceived(self.target.endpoint, message, host.clock()))


class Network:
    """Owns the data channels' connections."""

    def __init__(self, world: World, noise: Noise) -> None:
        self.world = world
        self.noise = noise
        self.channels: dict[str, SimChannel] = {}  # of decode workers, by endpoint
        self.links: dict[str, Link] = {}  # by identity
        self._num_links = 0

    def connect(self, source: SimChannel, endpoint: str) -> Link:
        self._num_links += 1
        link = Link(source, self.channels[endpoint], f"{self._num_links:08x}")
        self.links[link.identity] = link
        return link

    def is_lost(self, message: Any) -> bool:
        """Whether this message gets lost."""
        if is_lost := self._strikes(self.noise.drop_rate):
            self.noise.happened("drop", message)
        return is_lost

    def spoilt(self, parcel: Parcel) -> Parcel:
        """With a frame that may have been damaged on its way."""
        if parcel.buffer is None or not self._strikes(self.noise.spoil_rate):
            return parcel
        self.noise.happened("spoil", parcel.message)
        data = bytearray(parcel.buffer)
        data[self.world.chance.randrange(len(data))] ^= 1
        return Parcel(parcel.message, memoryview(data))

    def is_repeated(self) -> bool:
        return self._strikes(self.noise.repeat_rate)

    def _strikes(self, rate: float) -> bool:
        return bool(rate) and self.world.chance.random() < rate


class SimChannel:
    """The channel of one worker process."""

    def __init__(
        self,
        network: Network,
        host: Host,
        say: Callable[[Any], None],
        budget_bytes: int,
        receiver: StoreReceiver | None = None,
    ) -> None:
        """`say` sends to the coordinator."""
        self.network = network
        self.host = host
        self.receiver = receiver
        self.endpoint = f"tcp://{host.worker_id}:1"
        self._say = say
        self._staging = Staging(budget_bytes)
        self._links: dict[str, Link] = {}  # by endpoint
        if receiver is not None:
            network.channels[self.endpoint] = self

    # -- as the loops know it -----------------------------------------------------------------

    @property
    def staging_budget_bytes(self) -> int:
        return self._staging.budget_bytes

    def staged_bytes(self, peer: str) -> int:
        return self._staging.staged_bytes(peer)

    def post(self, event: object) -> None:
        self.host.post(event)

    def send_control(self, message: m.ToCoordinator) -> None:
        self._say(message)

    def send_data(self, peer: str, message: Any, buffer: memoryview | None = None) -> None:
        if "://" not in peer:
            self._answer(peer, message)
            return
        parcel = Parcel(over_the_wire(message, m.PrefillToDecode), buffer)
        if not self._staging.add(peer, parcel.num_bytes):
            self.post(SendFailed(peer, message))
            return
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = self.network.connect(self, peer)
        if self.network.is_lost(message):
            self.unstage(peer, parcel.num_bytes)
            return
        link.num_staged += parcel.num_bytes
        self._put(link, self.network.spoilt(parcel))

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._staging.remove(peer, link.num_staged)
            link.close()

    # -- as the simulation knows it -----------------------------------------------------------

    def unstage(self, peer: str, num_bytes: int) -> None:
        if self._staging.remove(peer, num_bytes):
            self.post(RoomAvailable(peer))

    @property
    def hosts(self) -> list[Host]:
        """To whom it is connected."""
        return [link.target.host for link in self._links.values()]

    def close(self, lost: bool) -> None:
        """The process has ended; `lost`: it had no time to send what was queued."""
        for link in self._links.values():
            link.close(lost)
        for link in self.network.links.values():
            if link.target is self and lost:
                link.answers.lose_end()

    def _put(self, link: Link, parcel: Parcel) -> None:
        alone = parcel.buffer is not None and self.network.noise.frames_go_alone
        lane = link.frames if alone else link.messages
        lane.send(parcel, self.host.clock())
        if parcel.buffer is None and self.network.is_repeated():
            lane.send(parcel, self.host.clock())

    def _answer(self, peer: str, message: Any) -> None:
        link = self.network.links.get(peer)
        if link is None or link.seen_closed:
            self.post(SendFailed(peer, message))
        elif link.is_open and not self.network.is_lost(message):
            received = over_the_wire(message, m.DecodeToPrefill)
            for _ in range(1 + self.network.is_repeated()):
                link.answers.send(received, self.host.clock())
