"""One member of the save pool: brings images from a model's staging memory into the files of a tier, one at a time.

Run: `python -P -m barrel_inference.workers.writer writer:0`, started by the supervisor at nice 19, permanent. While it is
down, others of the pool take its work; an image that it had begun is handed to one of them by its model.

A crash at any point leaves either a complete row or none:

1. `created`   a temporary file next to the target, made exclusively, its space reserved (a full disk is an error here)
2. `written`   the image
3. `synced`    its bytes are on the medium
4. `checked`   the index says that the reservation is still ours
5. `linked`    the final name, which must not exist; one that exists is read fully, and kept if it is a valid image
6. `unlinked`  the temporary name is gone
7. `durable`   the directory is on the medium
8. `published` the index has the row

The temporary file's name has our process id, so the tier knows whose leftovers it finds. BARREL_TEST_STOP_AT names a stage
after which the process kills itself, BARREL_TEST_WRITE_DELAY_S makes stage 2 that much longer: both for tests of the above.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from barrel_inference import actor as actors
from barrel_inference import protocol
from barrel_inference.actor import Actor, Request
from barrel_inference.errors import BarrelError, InvalidArgument
from barrel_inference.protocol import Location, Tier
from barrel_inference.tiers import files, kvc, names
from barrel_inference.tiers.arena import ArenaGone, Mappings
from barrel_inference.tiers.kvc import CorruptImage

INDEX_DEADLINE_S = 30.0


class Outcome(NamedTuple):
    """What became of the final name."""

    location: Location  # with the size of the file that is there now
    adopted: bool = False  # it was there already
    same_tokens: bool = True  # the file that is there says what the index was told


class Lost(Exception):
    """The image cannot be published; the reason is in the log."""


class WriterProcess:
    """The process: writes arrive, one at a time goes through the stages."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.mappings = Mappings(actor.runtime_dir)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        # One after the other and in the order of arrival, so that parents come before their children.
        self._turn = asyncio.Lock()
        actor.on(protocol.Write, self.write)
        actor.on_down(self.peer_down)

    async def serve(self, _actor: Actor) -> dict[str, Any]:
        """Nothing to prepare."""
        return {}

    async def drain(self, _actor: Actor) -> None:
        """Finish what has arrived, as far as the time to stop allows: models were stopped before, nothing new comes."""
        await self._turn.acquire()
        self.thread.shutdown()
        self.mappings.close()

    def peer_down(self, down: protocol.Down) -> None:
        """Let go of a dead model's memory; a write under way keeps its own view of it."""
        self.mappings.drop(down.id, down.incarnation)

    async def write(self, message: protocol.Write, _request: Request) -> protocol.Written:
        """Publish one image."""
        if message.location.name != names.file_name(message.key):
            raise InvalidArgument(f"file name {message.location.name!r} is not that of key {message.key.hex()}")
        self.actor.cast("index", protocol.Handed(token=message.token, writer=self.actor.id))
        # Now, not when its turn comes: its model may be gone by then.
        mapped = self.actor.loop.run_in_executor(None, self._map, message)
        async with self._turn:
            try:
                return await self._publish(message, await mapped)
            except Lost as lost:
                self.actor.log.warning("write.failed", server=message.location.server, reason=str(lost))
                self.actor.cast("index", protocol.Abort(tokens=[message.token], reason="failed"))
                return protocol.Written(published=False)

    def _map(self, message: protocol.Write) -> memoryview:
        """The image in its model's memory, which stays as long as somebody looks at it."""
        try:
            mapping = self.mappings.get(message.owner, message.owner_incarnation)
            return mapping.view(message.offset, message.size_bytes)
        except ArenaGone as error:
            raise Lost(f"staging: {error}") from error

    async def _publish(self, message: protocol.Write, view: memoryview) -> protocol.Written:
        loop = self.actor.loop
        temp = names.temp_name(message.key, os.getpid(), message.token)
        tokens = await loop.run_in_executor(self.thread, self._stage_temp, message, temp, view)
        try:
            await self.actor.peer("index").call(
                protocol.CheckReservation(token=message.token), protocol.Ok, deadline_s=INDEX_DEADLINE_S
            )
        except BarrelError as error:
            await loop.run_in_executor(self.thread, remove_temp, message, temp)
            raise Lost(f"reservation: {error}") from error
        reached("checked")
        outcome = await loop.run_in_executor(self.thread, give_name, message, temp, tokens)
        if not outcome.same_tokens:
            # The row is that of the file. Giving the place back makes the tier read it and tell the index.
            self.actor.cast("index", protocol.Abort(tokens=[message.token]))
            return protocol.Written(published=False, adopted=True)
        try:
            await self.actor.peer("index").call(
                protocol.Publish(token=message.token, location=outcome.location, adopted=outcome.adopted),
                protocol.Ok,
                deadline_s=INDEX_DEADLINE_S,
            )
        except BarrelError as error:
            raise Lost(f"publication: {error}") from error  # the file is complete: the tier finds it
        reached("published")
        tier = self.actor.peers.get(message.location.server)
        if tier is not None and tier.about.get("kind") == Tier.DISK and not outcome.adopted:
            self.actor.count(bytes_written_disk=message.size_bytes)
        return protocol.Written(published=True, adopted=outcome.adopted)

    def _stage_temp(self, message: protocol.Write, temp: str, view: memoryview) -> bytes:
        """Stages 1 to 3; the image's token ids."""
        try:
            tokens = kvc.open_image(view, message.key).meta.token_ids
            write_temp(message, temp, view)
            kvc.open_image(view, message.key)  # its model did not give the slab to another image meanwhile
        except CorruptImage as error:
            remove_temp(message, temp)
            raise Lost(f"staging: {error}") from error
        except OSError as error:
            remove_temp(message, temp)
            raise Lost(f"{message.location.name}: {error.strerror}") from error
        return tokens


def write_temp(message: protocol.Write, temp: str, view: memoryview) -> None:
    """A temporary file with the image's bytes on the medium."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        files.open_root(message.root) as root,
        files.open_shard(root, names.shard_of(message.key), create=True) as directory,
    ):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp, dir_fd=directory)  # an attempt of ours that was called off half-way
        descriptor = os.open(temp, flags, 0o600, dir_fd=directory)
        try:
            os.posix_fallocate(descriptor, 0, len(view))
            reached("created")
            delay_s = float(os.environ.get("BARREL_TEST_WRITE_DELAY_S", "0"))
            if delay_s:
                time.sleep(delay_s)
            done = 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], done)
            reached("written")
            os.fdatasync(descriptor)
            reached("synced")
        finally:
            os.close(descriptor)


def give_name(message: protocol.Write, temp: str, tokens: bytes) -> Outcome:
    """Stages 5 to 7."""
    base = message.location.name.partition("/")[2]
    try:
        with (
            files.open_root(message.root) as root,
            files.open_shard(root, names.shard_of(message.key)) as directory,
        ):
            outcome = link_or_adopt(directory, temp, base, message, tokens)
            reached("linked")
            os.unlink(temp, dir_fd=directory)
            reached("unlinked")
            os.fsync(directory)
            reached("durable")
            return outcome
    except OSError as error:
        remove_temp(message, temp)
        raise Lost(f"{message.location.name}: {error.strerror}") from error


def link_or_adopt(directory: int, temp: str, base: str, message: protocol.Write, tokens: bytes) -> Outcome:
    """Give the temporary file its final name. A valid image that has it already is kept; anything else is replaced."""
    for _attempt in range(3):
        try:
            os.link(temp, base, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            return Outcome(message.location)
        except FileExistsError:
            pass
        try:
            there = files.read_verified(directory, base, message.key)
            size_bytes = os.stat(base, dir_fd=directory, follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
        except CorruptImage:
            with contextlib.suppress(FileNotFoundError):
                files.remove(directory, base)
            continue
        where = message.location
        location = Location(where.server, where.incarnation, size_bytes, 0, where.name)
        return Outcome(location, adopted=True, same_tokens=there.token_ids == tokens)
    raise FileExistsError(0, "the name is taken again and again")


def remove_temp(message: protocol.Write, temp: str) -> None:
    """Remove a temporary file if it is there; one that cannot be removed is swept by the tier."""
    with (
        contextlib.suppress(OSError),
        files.open_root(message.root) as root,
        files.open_shard(root, names.shard_of(message.key)) as directory,
    ):
        os.unlink(temp, dir_fd=directory)


def reached(stage: str) -> None:
    """A stage is behind us: the place where crash tests kill the process."""
    if os.environ.get("BARREL_TEST_STOP_AT") == stage:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """The process's life; its exit status."""
    made: list[WriterProcess] = []

    def make(actor: Actor) -> Callable[[Actor], Any]:
        made.append(WriterProcess(actor))
        return made[0].serve

    return actors.run(make, drain=lambda actor: made[0].drain(actor))


if __name__ == "__main__":
    sys.exit(main())
