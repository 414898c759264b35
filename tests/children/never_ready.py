"""A child that starts for ever."""

import asyncio
import sys

from barrel_inference import actor


def make(_child):
    async def serve(_child):
        await asyncio.Event().wait()

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
