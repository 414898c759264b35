"""One process per loaded model.

Reading order: request (what was asked, pure), sequences (who holds which tokens, pure), batch (which rows next, pure),
chain (nodes of a save, seam of a restore, pure), text (stops, UTF-8, spans, pure), engine (the interface), scheduler (the
engine thread), cache_client (the I/O side of restores and saves), process (the life).
"""
