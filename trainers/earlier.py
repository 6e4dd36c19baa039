"""What a trainer's calls came to, for a rank that joins in a later fit and runs the program from its beginning.

Its calls before that fit are not made: it gets what the others got. So it must have all that a program can go by.
"""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.surviving import Call

TOLD = ("fit", "evaluate", "save", "load", "parameters_sha256")  # calls that are not made once more
MADE_ALONE = ("edit",)  # of the parameters, which a rank that joins gets from the others


class Earlier:
    """The calls of one trainer so far, the same on all ranks. lacking: why later ranks can't have all results."""

    def __init__(self) -> None:
        self.results: list[list[Any]] = []  # of each its name and what JSON can hold of its result
        self.lacking = ""
        self._fitted = False
        self._read = 0  # by a rank that joins

    def note(self, call: "Call[Any]", result: Any) -> None:
        """All ranks have made a call. Local."""
        if call.name in TOLD:
            self.results.append([call.name, json.loads(json.dumps(call.told(result)))])
            self._fitted |= call.takes_newcomers
        elif self._fitted and call.name not in MADE_ALONE:
            self.lacking = f"it could not have what {call.name} has returned"

    def fail(self, call: "Call[Any]", error: BaseException) -> None:
        """A call has ended in an error, which a program may catch. Local."""
        if call.takes_newcomers:
            self.lacking = f"it could not come to the {type(error).__name__} in which an earlier fit has ended"

    def hear(self, results: list[list[Any]]) -> None:
        """What those that this rank is to join have noted. Local."""
        self.results[:], self._fitted = results, "fit" in (name for name, _ in results)

    def answer(self, call: "Call[Any]") -> list[Any]:
        """What a call came to that the others have made already, in a list; or nothing. Local, on a rank that joins.

        A program may leave out other calls than fits on such ranks.
        """
        if call.name in TOLD:
            for place in range(self._read, len(self.results)):
                name, told = self.results[place]
                if name == call.name:
                    self._read = place + 1
                    return [call.heard(told)]
                if name == "fit":
                    break
        return []
