"""A catalog that does not fit: what a conversation lists of it, over a map of the rest.

The text begins with what stays equal over a conversation, and a skill that is listed stays at its position, so that a
provider's cache of beginnings holds. See `docs/explanation/catalogs.md`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kdskills.prompts.blocks import one_line
from kdskills.prompts.catalog import LEVELS, Catalog, CatalogDraft, too_small
from kdskills.skills.model import TokenCounter

RANKED: Final = LEVELS.index("ranked")

LISTED_PERCENT: Final = 70
"""What a new list may take of the budget; the rest is for the map, and for what later requests add."""

PINNED_PERCENT: Final = 20
"""What skills that pin themselves may take."""

MAP_PERCENT: Final = 10

NEEDED_HITS: Final = 5
"""The best of a request that must be listed, if earlier ones have to go for it: the right one is among them 97 times of 100."""

ADDED_HITS: Final = 10
"""The best of a later request that are added while there is room."""

EXAMPLES: Final = 3
_NAME_LENGTH: Final = 40


@dataclass(frozen=True)
class CatalogListing:
    """Renders a part of a catalog, and decides which.

    Args:
        draft: All skills there are, and their form.
        budget: Most tokens of a text.
        count: Counts the tokens of a text.
        mapped: Whether the text tells which namespaces there are.
    """

    draft: CatalogDraft
    budget: int
    count: TokenCounter
    mapped: bool = True
    _sizes: dict[tuple[str, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def catalog(self, listed: Sequence[str]) -> Catalog:
        """Return the catalog that shows the skills with the full ids *listed* in this order, or the first that fit."""
        shown = self.fitting(listed, self.budget)
        total = len(self.draft.entries)
        if self._tokens(shown) > self.budget:
            return Catalog("", RANKED, 0, total, 0, (too_small(self.budget),))
        text = self._text(shown)
        return Catalog(text, RANKED, len(shown), total, self.count(text), listed=shown)

    def following(
        self, before: Sequence[str], pinned: Sequence[str], hits: Sequence[str], own: Collection[str]
    ) -> tuple[str, ...]:
        """Return what a conversation lists next.

        What is listed stays, and what is new comes behind it. Where that does not fit, a new list begins.

        Args:
            before: What it lists now, in order.
            pinned: What must be listed: loaded, or named in the request.
            hits: What fits the request, the best first.
            own: What pins itself; it begins every list.
        """
        standing = self.fitting(before, self.budget)
        needed = [full_id for full_id in (*pinned, *hits[:NEEDED_HITS]) if full_id not in standing]
        if standing and not needed:
            return standing
        if standing:
            wanted = dict.fromkeys((*standing, *needed, *hits[:ADDED_HITS]))
            longer = self.fitting(tuple(wanted), self.budget)
            if len(longer) >= len(standing) + len(dict.fromkeys(needed)):
                return longer
        first = self.fitting(tuple(own), self.budget * PINNED_PERCENT // 100)
        must = tuple(dict.fromkeys((*first, *pinned, *hits[:NEEDED_HITS])))
        share = self.fitting(tuple(dict.fromkeys((*must, *hits))), self.budget * LISTED_PERCENT // 100)
        return share if len(share) >= len(must) else self.fitting(must, self.budget)

    def fitting(self, listed: Sequence[str], most: int) -> tuple[str, ...]:
        """Return the longest beginning of *listed* whose text has at most *most* tokens; nothing where none has."""
        order = tuple(full_id for full_id in listed if full_id in self._by_id)
        if self._tokens(order) <= most:
            return order
        low, high = 0, len(order) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._tokens(order[:middle]) <= most else (low, middle - 1)
        return order[:low]

    @cached_property
    def _by_id(self) -> dict[str, int]:
        return {entry.full_id: at for at, entry in enumerate(self.draft.entries)}

    def _tokens(self, listed: tuple[str, ...]) -> int:
        if listed not in self._sizes:
            self._sizes[listed] = self.count(self._text(listed))
        return self._sizes[listed]

    def _text(self, listed: Sequence[str]) -> str:
        entries = [self.draft.entries[self._by_id[full_id]] for full_id in listed]
        return self.draft.render_listed(entries, self._map if self.mapped else ())

    @cached_property
    def _map(self) -> tuple[str, ...]:
        """A line a namespace, the largest first; those that have no room are counted."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for entry in self.draft.entries:  # of a full id and no name, which may leave out the namespace
            namespace, _, name = entry.full_id.partition(".")
            names[namespace].append(name)
        counts = Counter({namespace: len(members) for namespace, members in names.items()})
        order = sorted(counts, key=lambda namespace: (-counts[namespace], namespace))
        lines: list[str] = []
        room = self.budget * MAP_PERCENT // 100
        for at, namespace in enumerate(order):
            line = map_line(namespace, names[namespace])
            rest = len(order) - at - 1
            tail = [f"{rest:,} more namespaces"] if rest else []
            if self.count("\n".join((*lines, line, *tail))) > room:
                return (*lines, f"{rest + 1:,} more namespaces") if lines else (f"{len(order):,} namespaces",)
            lines.append(line)
        return tuple(lines)


def map_line(namespace: str, names: Sequence[str]) -> str:
    """Return how many skills a namespace has, with examples from all over it."""
    order = sorted(names)
    examples = dict.fromkeys(order[number * (len(order) - 1) // max(1, EXAMPLES - 1)] for number in range(EXAMPLES))
    shown = ", ".join(one_line(name)[:_NAME_LENGTH] for name in examples)
    count = (
        f"{len(order):,} skills, e.g."
        if len(order) > len(examples)
        else f"{len(order):,} skill{'s' * (len(order) > 1)}:"
    )
    return f"{one_line(namespace)[:_NAME_LENGTH]}: {count} {shown}"
