"""What `papaya client` prints: endings of visits on stdout, remarks, each once, on stderr."""

from __future__ import annotations

from collections import Counter

from papaya.cli.output import note, plural, print_data, print_json
from papaya.device.events import (
    Event,
    NotEligible,
    SelectorReachable,
    SelectorUnreachable,
    Troubled,
    VisitEnded,
)


class Printer:
    def __init__(self, format_: str) -> None:
        self._is_json = format_ == "json"
        self._endings: Counter[str] = Counter()
        self._noted: set[str] = set()

    def on_event(self, event: Event) -> None:
        if self._is_json:
            print_json(event)
        match event:
            case VisitEnded():
                self._endings[event.ending] += 1
                if not self._is_json:
                    print_data(_line(event))
            case NotEligible():
                self._note_once(f"not eligible: {'; '.join(event.reasons)}")
            case Troubled():
                self._note_once(f"{event.device}: {event.problem}")
            case SelectorUnreachable():
                note(f"{event.server} does not answer: {event.problem}; trying again")
                self._note_once("hint: is it running? `papaya serve` starts a server here")
            case SelectorReachable():
                note(f"{event.server} answers again")

    def summarize(self) -> None:
        visits = plural(sum(self._endings.values()), "visit")
        endings = ", ".join(f"{count:,} {ending}" for ending, count in self._endings.most_common())
        note(f"{visits}: {endings}" if endings else visits)

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            note(text)


def _line(ended: VisitEnded) -> str:
    # A device that stops tells the server a coarse reason, and its owner the real one.
    reason = "" if ended.ending == "stopped" else ended.reason
    why = "; ".join(filter(None, (reason, ended.detail)))
    words = [ended.device, ended.ending, ended.task or "", f"({why})" if why else ""]
    return " ".join(filter(None, words))
