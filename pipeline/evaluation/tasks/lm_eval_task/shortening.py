"""Cuts requests that are longer than the context."""


class TooShortError(ValueError):
    """The context has no room for an answer."""


class Shortening:
    """Cuts contexts from the left but keeps bos, and counts requests."""

    def __init__(self, bos_id: int, window: int) -> None:
        """`window` is the number of tokens that the model reads at most."""
        self._bos_id = bos_id
        self._window = window
        self.requests = 0
        self.shortened = 0
        self.longest = 0
        """Tokens of the longest request."""

    def cut(self, context: list[int], answer: int) -> list[int]:
        """The end of a context that fits, with `answer` further tokens, into the window.

        Raises:
            TooShortError: there is no room.
        """
        self.requests += 1
        self.longest = max(self.longest, len(context) + answer)
        room = self._window - answer
        if room < 1:
            raise TooShortError(
                f"--context: found {self._window} tokens with an answer of {answer}, wanted more"
            )
        if len(context) <= room:
            return context
        self.shortened += 1
        bos = context[:1] if context[0] == self._bos_id else []
        return bos + context[len(context) - room + len(bos) :]
