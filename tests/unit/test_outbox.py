"""The outbox: what wakes the loop, and what goes along."""

import asyncio

from barrel_inference.workers.model.outbox import Outbox


def test_what_nobody_waits_for_goes_along_in_order() -> None:
    """It does not wake the loop by itself; the next call that does brings it, and it comes first."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        made: list[str] = []
        outbox = Outbox(loop, lambda: 0.0)
        outbox.put_along(lambda: made.append("row"))
        turned, woken = asyncio.Event(), asyncio.Event()
        loop.call_soon_threadsafe(turned.set)
        await turned.wait()
        assert made == []
        outbox.put(lambda: made.append("token"))
        outbox.put(woken.set)
        await woken.wait()
        assert made == ["row", "token"]
        outbox.put_along(lambda: made.append("claim"))
        outbox.deliver()
        assert made[-1] == "claim"

    asyncio.run(run())
