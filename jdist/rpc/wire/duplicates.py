"""Which requests of a channel have come before."""


class Duplicates:
    """Remembers the numbers of the requests that came, in little memory.

    Numbers rise from 1 and come almost in order. All up to a mark are known; what
    came beyond it is a set, which is empty when nothing is missing. A number more than
    `window` behind the highest one counts as seen: better to lose a request (its caller
    gets a timeout) than to execute one twice. 0 is no number: what bears it is not
    answered, and always new.

    Example:
      >>> seen = Duplicates()
      >>> [seen.is_new(number) for number in (1, 3, 1, 2, 3, 0, 0)]
      [True, True, False, True, False, True, True]
    """

    __slots__ = ("_beyond", "_mark", "_window")

    def __init__(self, window: int = 4096) -> None:
        self._mark = 0
        self._beyond: set[int] = set()
        self._window = window

    def is_new(self, number: int) -> bool:
        """Whether the number comes for the first time; it is remembered."""
        if number == self._mark + 1:
            self._mark = number
            if self._beyond:
                self._advance()
            return True
        if number <= self._mark or number in self._beyond:
            return number == 0
        self._beyond.add(number)
        if number - self._mark > self._window:
            self._mark = number - self._window
            self._beyond = {n for n in self._beyond if n > self._mark}
            self._advance()
        return True

    def _advance(self) -> None:
        while self._mark + 1 in self._beyond:
            self._mark += 1
            self._beyond.discard(self._mark)
