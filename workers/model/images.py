"""Opening stored images in the model process: from a tier's arena, or from a file read into warm memory.

Any thread may open. What comes back was verified; bytes in an arena may still change while they are imported, so the importer
asks `is_intact` afterwards and throws away what it imported when the answer is no.
"""

import mmap
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from barrel_inference.protocol import Location
from barrel_inference.tiers import files, kvc, names
from barrel_inference.tiers.arena import PAGE_BYTES, Mapping, Mappings
from barrel_inference.tiers.kvc import CorruptImage, Image

# Kept warm between restores: a prompt of about 2,000 tokens of a small model.
KEEP_WARM_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified image, and the question whether its bytes were still the same after they were used."""

    image: Image
    is_intact: Callable[[], bool]


class WarmBuffers:
    """Memory for files, reused so that a read does not stop at every page. A buffer is free when no view of it lives."""

    def __init__(self, keep_bytes: int = KEEP_WARM_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []

    def warm(self, size_bytes: int) -> None:
        """Keep as many buffers of that size as there is room for, touched, so that the first reads find them."""
        while sum(len(buffer) for buffer in self._buffers) + size_bytes <= self._keep_bytes:
            buffer = files.page_aligned(size_bytes)
            buffer[::PAGE_BYTES] = b"\1" * len(range(0, size_bytes, PAGE_BYTES))
            with self._lock:
                self._buffers.append(buffer)
            del buffer

    def take(self, size_bytes: int) -> memoryview:
        """A view of that many bytes; let go of it, and of all slices of it, to give it back."""
        with self._lock:
            idle = [n for n in range(len(self._buffers)) if self._is_idle(n)]
            fitting = [n for n in idle if len(self._buffers[n]) >= size_bytes]
            if fitting:
                return memoryview(self._buffers[min(fitting, key=lambda n: len(self._buffers[n]))])[:size_bytes]
            spare_bytes = self._keep_bytes - size_bytes - sum(len(buffer) for buffer in self._buffers)
            for n in reversed(idle):  # from the end, so that the numbers before stay right
                if spare_bytes >= 0:
                    break
                spare_bytes += len(self._buffers.pop(n))
            buffer = files.page_aligned(size_bytes)
            if spare_bytes >= 0:
                self._buffers.append(buffer)
            return memoryview(buffer)[:size_bytes]

    def _is_idle(self, number: int) -> bool:
        # CPython: every memoryview, and every slice of one, holds a reference to the mapping; the list and the call
        # below are the other two. A buffer that is in use by any path is therefore never handed out twice.
        return sys.getrefcount(self._buffers[number]) == 2


class ImageReader:
    """Everything a model process opens, of all tiers."""

    def __init__(self, runtime_dir: Path) -> None:
        self._mappings = Mappings(runtime_dir)
        self._buffers = WarmBuffers()

    def open(self, location: Location, key: bytes, root: str) -> Opened:
        """The image of `key` at a location; `root` is the file tier's, "" for an arena. Blocks.

        Raises:
            CorruptImage: what is there is not that image.
            OSError: nothing is there, or it cannot be read (`ArenaGone` is one).
        """
        return self._open_slab(location, key) if not location.name else self._open_file(location, key, root)

    def warm(self, image_bytes: int) -> None:
        """Make room for files of that size before the first one is read. Blocks."""
        self._buffers.warm(image_bytes)

    def mapping(self, location: Location) -> Mapping:
        """The arena a location lies in; blocks on its first use.

        Raises:
            ArenaGone
        """
        return self._mappings.get(location.server, location.incarnation)

    def drop(self, server: str, incarnation: int) -> None:
        """A tier is down: its memory goes with the last view of it."""
        self._mappings.drop(server, incarnation)

    def close(self) -> None:
        """Let go of everything."""
        self._mappings.close()

    def _open_slab(self, location: Location, key: bytes) -> Opened:
        view = self.mapping(location).view(location.offset, location.size_bytes)
        before = kvc.header_fingerprint(view)
        image = kvc.open_image(view, key)
        return Opened(image, lambda: kvc.header_fingerprint(view) == before)

    def _open_file(self, location: Location, key: bytes, root: str) -> Opened:
        if location.name != names.file_name(key):
            raise CorruptImage("another key's name")
        base = location.name.partition("/")[2]
        with (
            files.open_root(root) as top,
            files.open_shard(top, names.shard_of(key)) as directory,
            files.open_regular(directory, base) as (descriptor, file_bytes),
        ):
            if file_bytes != location.size_bytes:
                raise CorruptImage(f"{file_bytes} bytes, the index says {location.size_bytes}")
            view = self._buffers.take(file_bytes)
            files.read_into(descriptor, view)
        return Opened(kvc.open_image(view, key), lambda: True)
