"""How fast an engine prefills, from two counters: tokens prefilled, and the seconds that took."""

from dataclasses import dataclass

# Tokens after which a prefill speed is worth having: below, it is the latency of a single step.
MIN_PREFILL_TOKENS = 512.0

# Seconds of prefilling over which the speed is smoothed.
PREFILL_HORIZON_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Tokens prefilled and the seconds spent on it, the last ones before all. Idle time does not fade it."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """None while there is too little to tell."""
        return self.tokens / self.seconds if self.tokens >= MIN_PREFILL_TOKENS and self.seconds > 0 else None

    def add(self, tokens: float, seconds: float) -> "PrefillSpeed":
        """Adds new work; what is older than the horizon loses weight."""
        tokens, seconds = self.tokens + tokens, self.seconds + seconds
        scale = min(1.0, PREFILL_HORIZON_SECONDS / seconds) if seconds > 0 else 1.0
        return PrefillSpeed(tokens * scale, seconds * scale)

    def since(self, before: tuple[float, float] | None, now: tuple[float, float] | None) -> "PrefillSpeed":
        """Adds what two counters (tokens, seconds) moved; nothing where one is unknown or moved back."""
        if before is None or now is None:
            return self
        tokens, seconds = now[0] - before[0], now[1] - before[1]
        return self.add(tokens, seconds) if tokens >= 0 and seconds >= 0 else self
