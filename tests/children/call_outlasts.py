"""A model whose engine call has lasted far beyond its budget, by its own account."""

import sys

from barrel_inference import actor


def make(child):
    async def serve(_child):
        child.call_age = lambda: (60_000, 1_000)
        return

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
