"""One process per loaded model.

Reading order. Pure: job (one request), text (what may be seen of a reply), chain (nodes of a save, seam of a restore), batch
(rows of a call), sequences (who holds which tokens), placement (which sequence a request gets), sessions, options. The engine:
engine (the interface), engine_stub, engine_llama with its llama_* parts. The engine thread: state, context, admission, restore,
decoding, recovery, saving, scheduler. The I/O thread: stream, gateway (callers), images and cache_client (index and tiers),
process (the life).
"""
