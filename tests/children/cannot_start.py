"""A child that knows that it can never start."""

import sys

from barrel_inference import actor
from barrel_inference.errors import BadModel


def make(_child):
    async def serve(_child):
        raise BadModel("model.gguf is a directory")

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
