"""A child that does everything right, and logs which peers come and go."""

import sys

from barrel_inference import actor


def make(child):
    child.on_up(lambda peer: child.log.info("peer.up", peer=peer.id, about=peer.about))
    child.on_down(lambda down: child.log.info("peer.down", peer=down.id, restarting=down.restarting))

    async def serve(_child):
        return {"answer": 42}

    return serve


if __name__ == "__main__":
    sys.exit(actor.run(make))
