"""A client written from docs/reference/protocol.md alone: pyzmq and msgpack, nothing of ours.

    python examples/plain_client.py ENDPOINT MODEL_ID PROMPT [TOKENS]

It greets the router, streams one completion with credit, and prints the text as it comes and the cache's part in it at the
end. What another language needs is the same: a ZeroMQ DEALER socket and a msgpack library.
"""

import itertools
import sys
import uuid

import msgpack
import zmq

VERSION = 1
CREDIT = 32  # events the router may send before we grant more
WAIT_MS = 30_000  # a running request is heard of every second; silence means that something broke


class Failed(Exception):
    """The runtime answered with an error: code, message, hint, retryable."""


class PlainClient:
    """One connection to the router."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)  # no identity of our own: the router takes any
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        greeting = self.call("router", "greet", {"version": VERSION})
        assert greeting["version"] == VERSION, greeting
        self.max_message_bytes = greeting["max_message_bytes"]

    def send(self, target, kind, verb, request_id, body, credit=0):
        header = [VERSION, kind, verb, request_id, 0, 0, credit]  # number 0, no deadline
        packed = msgpack.packb(body)
        self.socket.send_multipart([target.encode(), msgpack.packb(header), packed])

    def receive(self, request_id):
        """(kind, verb, number, body) of the next message of this request."""
        while True:
            if not self.socket.poll(WAIT_MS):
                raise TimeoutError(f"nothing heard for {WAIT_MS} ms")
            _route, header, body = self.socket.recv_multipart()
            _version, kind, verb, answered_id, number = msgpack.unpackb(header)[:5]
            if answered_id == request_id:
                return kind, verb, number, msgpack.unpackb(body)

    def call(self, target, verb, body):
        """The reply of a call that has one answer."""
        request_id = uuid.uuid4().hex
        self.send(target, "call", verb, request_id, body)
        kind, _verb, _number, answer = self.receive(request_id)
        if kind == "error":
            raise Failed(answer["code"], answer["message"], answer["hint"], answer["retryable"])
        return answer

    def stream(self, model_id, prompt, **options):
        """Yield each piece of text, then the result."""
        request_id = uuid.uuid4().hex
        target = f"model:{model_id}"
        body = {"prompt": prompt, **options}
        self.send(target, "call", "complete", request_id, body, CREDIT)
        taken = 0
        for expected in itertools.count():
            kind, verb, number, answer = self.receive(request_id)
            if kind == "done":
                yield answer
                return
            if kind == "error":
                raise Failed(answer["code"], answer["message"], answer["hint"], answer["retryable"])
            assert number == expected, f"event {number} came instead of {expected}"
            taken += 1
            if taken == CREDIT // 2:  # renewed at half, so that the model never has to wait for us
                self.send(target, "cast", "credit", "", {"request_id": request_id, "events": taken})
                taken = 0
            if verb == "token":
                yield answer["data"]

    def close(self):
        self.socket.close()
        self.context.term()


def main(endpoint, model_id, prompt, tokens="16"):
    client = PlainClient(endpoint)
    result = {}
    for piece in client.stream(model_id, prompt, response_tokens=int(tokens)):
        if isinstance(piece, bytes):
            print(piece.decode("utf-8", "replace"), end="", flush=True)
        else:
            result = piece
    print()
    print(
        f"{result['finish_reason']}: {result['completion_tokens']} tokens, {result['cache_hit_kind']}", file=sys.stderr
    )
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
