"""A child that never finishes stopping."""

import asyncio
import sys

from barrel_inference import actor


def make(_child):
    async def serve(_child):
        return None

    return serve


async def drain(_child):
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(actor.run(make, drain=drain))
