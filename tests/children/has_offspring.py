"""A child that starts a process of its own, whose pid is told as `offspring`."""

import subprocess
import sys

from barrel_inference import actor


def make(_child):
    async def serve(_child):
        process = subprocess.Popen(["sleep", "3600"])  # noqa: ASYNC220 - it is not waited for
        return {"offspring": process.pid}

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
