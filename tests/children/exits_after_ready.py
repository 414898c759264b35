"""A child that becomes ready and ends at once, with the status `boot["status"]`."""

import os
import sys

from barrel_inference import actor


def make(child):
    async def end():
        child.context.destroy(linger=1000)  # ready is out before we are gone
        os._exit(child.boot.boot["status"])

    async def serve(_child):
        child.loop.call_later(0.01, lambda: child.spawn(end()))
        return

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
