"""A child whose loop never turns again after its first beat."""

import sys
import time

from barrel_inference import actor


def make(child):
    async def serve(_child):
        child.loop.call_later(0.01, time.sleep, 3600)
        return

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
