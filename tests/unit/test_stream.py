"""A caller's stream and the way of its pieces from the engine thread: order, credit, intervals, and nothing lost."""

import asyncio
import threading
import time
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from barrel_inference.protocol import Message, TokenEvent
from barrel_inference.workers.model.outbox import Outbox
from barrel_inference.workers.model.stream import Stream
from barrel_inference.workers.model.text import Piece


@dataclass
class Reader:
    """What was sent."""

    events: list[tuple[str, bytes, list[int]]] = field(default_factory=list)
    finished: int = 0

    def take(self, kind: str, body: Message) -> None:
        assert isinstance(body, TokenEvent)
        self.events.append((kind, body.data, body.token_ids))

    def finish(self) -> None:
        self.finished += 1


def token(number: int) -> Piece:
    return Piece("token", b"%d " % number, (number,))


def test_first_token_goes_at_once_and_the_next_ones_share_an_event() -> None:
    """What is generated within the interval comes in one event when that is over."""
    reader = Reader()
    stream = Stream(reader.take, credit=9, seed=1, interval_s=0.02)
    stream.push([token(1)], now_s=10.001)
    stream.push([token(2)], now_s=10.008)
    stream.push([token(3)], now_s=10.016)
    assert reader.events == [("token", b"1 ", [1])]
    stream.pump(now_s=stream.next_s)
    assert reader.events[1:] == [("token", b"2 3 ", [2, 3])]


def test_streams_send_at_the_same_instants() -> None:
    """Whenever two streams began, their next events are due together: one wake-up serves both."""
    streams = [Stream(Reader().take, credit=9, seed=1, interval_s=0.02) for _ in range(2)]
    for stream, now_s in zip(streams, (10.001, 10.013), strict=True):
        stream.push([token(1)], now_s)
    assert streams[0].next_s == streams[1].next_s


def test_who_cannot_send_is_not_waited_for() -> None:
    """A reader without credit, or one that waits for its end only, says nothing about when others may send."""
    stream = Stream(Reader().take, credit=1, seed=1, interval_s=0.02)
    assert stream.can_send
    stream.push([token(1)], now_s=10.005)
    assert not stream.can_send
    stream.grant(1, now_s=10.005)
    stream.push([token(2)], now_s=10.006)
    assert stream.can_send


def test_last_tokens_go_at_once() -> None:
    """What ends a reply is not held back, though its request ends a decode call later."""
    reader = Reader()
    stream = Stream(reader.take, credit=9, seed=1, interval_s=10.0)
    stream.push([token(1)], now_s=1.0)
    stream.push([token(2)], now_s=1.1)
    stream.hurry()
    stream.push([token(3)], now_s=1.2)
    assert [ids for _, _, ids in reader.events] == [[1], [2, 3]]


def test_end_does_not_wait_for_the_interval() -> None:
    """The last tokens and the end are sent at once."""
    reader = Reader()
    stream = Stream(reader.take, credit=9, seed=1, interval_s=10.0)
    stream.push([token(1)], now_s=1.0)
    stream.push([token(2)], now_s=1.1)
    stream.end(reader.finish, now_s=1.2)
    assert [ids for _, _, ids in reader.events] == [[1], [2]]
    assert reader.finished == 1


def test_ends_of_spans_are_never_merged() -> None:
    """A caller counts the ends of spans, so each is an event of its own even when no text lies between two."""
    reader = Reader()
    stream = Stream(reader.take, credit=1, seed=1)
    stream.push([token(1)], now_s=0.0)
    stream.push([Piece("thinking_end", b"", (2,)), Piece("thinking_end", b"", (3,))], now_s=0.0)
    stream.grant(5, now_s=0.0)
    assert [kind for kind, _, _ in reader.events] == ["token", "thinking_end", "thinking_end"]


@given(
    st.lists(st.sampled_from(["push", "grant", "pump", "wait"]), max_size=60),
    st.integers(1, 3), st.sampled_from([0.0, 0.02, 1.0]),
)  # fmt: skip
def test_nothing_is_lost_or_sent_twice(steps: list[str], credit: int, interval_s: float) -> None:
    """Whatever the credit and the interval, the reader gets every byte and every token once, in order, then the end."""
    reader = Reader()
    stream = Stream(reader.take, credit=credit, seed=1, interval_s=interval_s)
    now_s, number, granted = 5.0, 0, credit
    for step in steps:
        if step == "push":
            number += 1
            stream.push([token(number)], now_s)
        elif step == "grant":
            granted += 1
            stream.grant(1, now_s)
        elif step == "pump":
            stream.pump(now_s)
        else:
            now_s += 0.015
        assert len(reader.events) <= granted
    stream.end(reader.finish, now_s)
    stream.grant(100, now_s)
    assert b"".join(data for _, data, _ in reader.events) == b"".join(token(n).data for n in range(1, number + 1))
    assert [id for _, _, ids in reader.events for id in ids] == list(range(1, number + 1))
    assert reader.finished == 1


def test_outbox_makes_every_call_in_order() -> None:
    """Calls from another thread are all made on the loop in their order, those for later too, and without a later one."""

    async def run() -> list[int]:
        made: list[int] = []
        done = asyncio.Event()
        outbox = Outbox(asyncio.get_running_loop(), lambda: time.monotonic() + 0.001)

        def make(number: int) -> None:
            made.append(number)
            if number == 999:
                done.set()

        def work() -> None:
            for number in range(1000):
                (outbox.put if number % 100 == 0 else outbox.put_for_later)(lambda n=number: make(n))  # type: ignore[misc]

        thread = threading.Thread(target=work)
        thread.start()
        async with asyncio.timeout(20):
            await done.wait()
        thread.join()
        return made

    assert asyncio.run(run()) == list(range(1000))
