"""A model that reports progress before it is ready."""

import sys

from barrel_inference import actor
from barrel_inference.protocol import LoadProgress


def make(child):
    async def serve(_child):
        child.supervisor.cast(LoadProgress(fraction=0.5))
        return

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
