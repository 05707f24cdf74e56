"""The figures of all actors at once: whoever is asked asks its peers, as an ingress has many actors behind it and a
scraper can't choose one. Each actor's samples carry its own label (`actors.metrics`), so none is added up."""

from __future__ import annotations

from collections.abc import Iterable

from actors.metrics import PREFIX, Metrics
from actors.peers import Switchboard

OPERATION = "metrics.render"

_HELP = b"# HELP "


class Scrape:
    """One actor's end: it answers for itself and gathers from the others."""

    def __init__(self, peers: Switchboard, metrics: Metrics) -> None:
        self._peers = peers
        self._metrics = metrics
        peers.offer(OPERATION, self._own)

    async def text(self) -> bytes:
        """The families of every actor that answered in time, and how many these are."""
        texts = [await self._metrics.render(), *await self._peers.ask_all(OPERATION)]
        name = f"{PREFIX}scraped_actors"
        answered = f"# HELP {name} Session actors that answered.\n# TYPE {name} gauge\n{name} {len(texts)}\n"
        return merge([*texts, answered.encode()])

    async def _own(self) -> bytes:
        return await self._metrics.render()


def merge(texts: Iterable[bytes]) -> bytes:
    """Several texts in Prometheus' format as one, in which each family stands once, as the format wants. Samples must
    differ in a label already. O(families): samples are not looked at. During an update two actors may know a family
    under different types: that of the first counts, the other's samples are left out."""
    heads: dict[bytes, tuple[bytes, bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for text in texts:
        for block in (b"\n" + text).split(b"\n" + _HELP)[1:]:
            about, kind, *rest = block.split(b"\n", 2)
            name = about.split(b" ", 1)[0]
            if heads.setdefault(name, (about, kind))[1] == kind:
                samples.setdefault(name, []).append(b"".join(rest).strip(b"\n"))
    families = (
        b"\n".join([_HELP + about, kind, *filter(None, samples[name]), b""]) for name, (about, kind) in heads.items()
    )
    return b"".join(families)
