"""A child that does everything right."""

import sys

from barrel_inference import actor


def make(_child):
    async def serve(_child):
        return {"answer": 42}

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
