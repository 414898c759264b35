"""How long the engine has been inside one call, for who watches it. Pure."""

# Without a look for so long we stood still (stopped, frozen), and the call with us: its time counts anew.
LATE_LOOK_S = 3.0


class CallAge:
    """The age of a call, looked at several times a second."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = self._woke_s = now_s

    def at(self, now_s: float, began_s: float) -> float:
        """Seconds since the call began; 0 for `began_s` = 0, which is none."""
        if now_s - self._looked_s > LATE_LOOK_S:
            self._woke_s = now_s
        self._looked_s = now_s
        return now_s - max(began_s, self._woke_s) if began_s else 0.0
