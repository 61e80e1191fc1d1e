"""How the time of communication splits into waiting and wire, a line a kind and link."""

from __future__ import annotations

from ringprof.analysis.findings.findings import Findings
from ringprof.analysis.findings.summary import Communication
from ringprof.analysis.kinds.kinds import in_a_sentence
from ringprof.analysis.transfers.hops import OTHER_HOST, SAME_HOST
from ringprof.report.tables import Listing
from ringprof.report.text import TextStyle, percent

_LINKS = {SAME_HOST: "within a host", OTHER_HOST: "between hosts"}


def terminal(found: Findings, style: TextStyle, listing: Listing) -> list[str]:
    """None on CPU, where no transfer's own time is known."""
    rows = found.summary.communication
    return [style.wrap("\n".join(map(_line, rows)))] if rows and not found.attribution.on_cpu else []


def _line(row: Communication) -> str:
    name = in_a_sentence(row.kind)
    link = f" {_LINKS[row.link]}" if row.link in _LINKS else ""
    rates = []
    if row.wire_gbps is not None:
        rates.append(f"{row.wire_gbps:.3g} GB/s")
    if row.best_gbps is not None:
        rates.append(f"{row.best_gbps:.3g} best seen on this link")
    shown = f" ({'; '.join(rates)})" if rates else ""
    waited = f"{percent(row.wait_share, 0)} of {name} time{link} was waiting for a peer"
    return f"{waited}, {percent(row.wire_share, 0)} on the wire{shown}."
