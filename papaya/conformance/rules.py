"""The rules that the kit checks. An id never changes its meaning; client authors cite it."""

from __future__ import annotations

from typing import NamedTuple

PAGE = "docs/spec/protocol.md"


class Rule(NamedTuple):
    """`anchor` is a heading of the page."""

    id: str
    anchor: str
    text: str

    @property
    def where(self) -> str:
        return f"{PAGE}#{self.anchor}"


RULES: tuple[Rule, ...] = (
    Rule("message", "json", "Every request is a valid message on the path of its type."),
    Rule("framing", "http", "A body has a Content-Length and no Transfer-Encoding."),
    Rule("token", "http", "A check-in carries the device token."),
    Rule("redirect", "http", "A client follows no redirect."),
    Rule("status", "one-visit", "A client acts on the message in the body, not on the status."),
    Rule("garbage", "one-visit", "A body that is not a message counts as no answer."),
    Rule("unknown-fields", "one-visit", "Unknown fields are ignored."),
    Rule("repeat", "one-visit", "A request without an answer is sent again, unchanged."),
    Rule("rejected", "rejected", "A rejected client comes back within its window, not earlier."),
    Rule("ticket", "json", "A request carries the newest ticket, unchanged."),
    Rule("leave", "joined", "A joined client completes the visit or sends Leave."),
    Rule("reason", "leave", "A client leaves with a code from the list, never with text."),
    Rule("heartbeat", "heartbeat", "Heartbeats continue from Joined until Completed."),
    Rule("hash", "parameters", "Parameters with a wrong hash are not used."),
    Rule("download", "parameters", "A broken download is resumed or repeated."),
    Rule("range", "parameters", "A resumed download asks for one range and sends If-Range."),
    Rule("chunks", "chunks", "Chunks have the right length, checksum and upload id."),
    Rule("same-bytes", "chunks", "An upload id always refers to the same bytes."),
    Rule("upload-url", "direct-uploads", "An upload that fails directly goes through a selector."),
    Rule("incomplete", "incomplete", "Exactly the missing chunks are sent again, then Complete."),
    Rule("counted", "the-update", "The update is one that the server counts."),
    Rule("evaluation", "the-update", "An evaluation reports one example and fills one bucket."),
    Rule("completed", "completed", "After Completed, the visit is over."),
    Rule("aborted", "aborted", "After Aborted, the client stops."),
    Rule("refused", "refused", "After Refused, the visit is over."),
    Rule("retry", "retry", "After Retry, the same request is sent again, not before after_s."),
    Rule("history", "participation-history", "A client does not take part again too soon."),
    Rule("examples", "secure-tasks", "In a secure task, a client reports one example."),
    Rule("decides", "secure-tasks", "The client decides by itself whether a task is secure."),
    Rule("evidence", "secure-tasks", "A client whose checks fail uploads nothing and leaves."),
    Rule("sealed", "secure-tasks", "A secure upload is masked, and its seed is sealed once."),
)
BY_ID = {rule.id: rule for rule in RULES}
