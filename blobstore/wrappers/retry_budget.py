"""How many retries a store may be sent: as many as its successes pay for, and a reserve for bad moments."""


class RetryBudget:
    """Bounds the retries of all operations together, where a count for each of them does not.

    While a store is down, every operation would be sent six times: the store that comes back meets six times its load,
    and goes down again. With a budget the first operations use up the reserve, and the rest are tried once each. Second
    requests for what is late are bounded in the same way (`HedgedStore`).

    Args:
        reserve: Retries that can be made without any success; the budget begins with them and never holds more.
        successes_per_retry: How many successes pay for one retry.

    Source:
        The standard mode of the AWS SDKs: a bucket of 500 tokens, a retry takes 5, a success gives 1.
    """

    def __init__(self, reserve: int, successes_per_retry: int) -> None:
        self._successes_per_retry = successes_per_retry
        self._tokens_max = self._tokens = reserve * successes_per_retry

    def take(self) -> bool:
        """Whether a retry may be made; if so, it is paid for."""
        if self._tokens < self._successes_per_retry:
            return False
        self._tokens -= self._successes_per_retry
        return True

    def refill(self) -> None:
        """Something succeeded."""
        self._tokens = min(self._tokens + 1, self._tokens_max)
