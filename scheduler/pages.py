"""A pool of K/V pages: which are free, whose the others are, and which hold a known prefix.

    free     nobody's, of no known content
    owned    in the tables of one or more sequences. One owner may write it; shared, it is read-only
    cached   nobody's, but of known content: it counts as free, and is taken when no page is really free

A page whose content is final gets a key (`publish`); a later sequence that knows the key adds the page to
its table (`share`). The ledger (page to number of owners) and the tables (owner to pages) say the same thing
twice on purpose: `check()` compares them. Target pages are one such pool, each shard's context pages another.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence


class PagePool:
    """Owns the page ids 0 .. num_pages - 1. Sequence ids are never reused, so releasing twice is harmless."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Popped from the end: the lowest id first, then the page freed last, which caches may still hold.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_owners = [0] * num_pages
        self._tables: dict[int, list[int]] = {}
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first is taken first

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free) + len(self._cached)

    def owners(self) -> set[int]:
        """The sequences that own at least one page."""
        return set(self._tables)

    def table(self, sequence_id: int) -> list[int]:
        """A copy of the pages a sequence owns, in the order of its positions."""
        return list(self._tables.get(sequence_id, ()))

    def num_owned(self, sequence_id: int) -> int:
        """The length of that table."""
        return len(self._tables.get(sequence_id, ()))

    def part(self, sequence_id: int, first: int, last: int) -> list[int]:
        """Pages first .. last - 1 of that table."""
        return self._tables[sequence_id][first:last]

    def extend(self, sequence_id: int, num_pages: int) -> list[int]:
        """Give a sequence this many more pages. The caller has made sure that they are free."""
        assert num_pages <= self.num_free, f"{num_pages} pages wanted, {self.num_free} free"
        free, num_owners = self._free, self._num_owners
        pages: list[int] = []
        for _ in range(num_pages):
            page = free.pop() if free else self._evict()
            assert num_owners[page] == 0, f"page {page} has an owner and is on the free list"
            num_owners[page] = 1
            pages.append(page)
        if pages:
            self._tables.setdefault(sequence_id, []).extend(pages)
        return pages

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of known keys, from the first on."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def find_last(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of known keys that ends with the last one."""
        pages: list[int] = []
        for key in reversed(keys):
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages[::-1]

    def num_cached(self, pages: Sequence[int]) -> int:
        """How many of these nobody owns: sharing them takes as many from the free ones."""
        return sum(page in self._cached for page in pages)

    def share(self, sequence_id: int, pages: Sequence[int]) -> None:
        """Append published pages to a sequence's table; it may not write them."""
        for page in pages:
            assert page in self._key_of, f"page {page} is of no known content"
            self._num_owners[page] += 1
            self._cached.pop(page, None)
        if pages:
            self._tables.setdefault(sequence_id, []).extend(pages)

    def publish(self, sequence_id: int, first: int, keys: Sequence[bytes]) -> None:
        """Say that the pages of the sequence's table from `first` on are full, and what they stand for.

        If another page is known by a key this one stays unknown, as its sequence's own.
        """
        key_of, page_of = self._key_of, self._page_of
        pages = self._tables[sequence_id][first : first + len(keys)]
        for page, key in zip(pages, keys, strict=True):
            if page not in key_of and key not in page_of:
                key_of[page] = key
                page_of[key] = page

    def release(self, sequence_id: int) -> int:
        """Let go of all pages of a sequence; returns how many. A second call lets go of nothing."""
        pages = self._tables.pop(sequence_id, ())
        for page in reversed(pages):  # the end of a prefix is taken again before its beginning
            self._let_go(page)
        return len(pages)

    def release_first(self, sequence_id: int, num_pages: int) -> None:
        """Let go of the first pages of a sequence's table."""
        if num_pages == 0:
            return
        table = self._tables[sequence_id]
        for page in table[:num_pages]:
            self._let_go(page)
        del table[:num_pages]
        if not table:
            del self._tables[sequence_id]

    def is_shared(self, page: int) -> bool:
        """Whether the page is read-only: of known content, or with more than one owner."""
        return self._num_owners[page] > 1 or page in self._key_of

    def check(self) -> None:
        """Every page is free, cached, or in as many tables as the ledger says; keys and pages agree."""
        owned: Counter[int] = Counter()
        for sequence_id, table in self._tables.items():
            assert table, f"an empty table of sequence {sequence_id}"
            assert len(set(table)) == len(table), f"sequence {sequence_id} has a page twice"
            owned.update(table)
        everything = sorted([*owned, *self._free, *self._cached])
        assert everything == list(range(self.num_pages)), f"pages lost or held twice: {everything}"
        for page, num_owners in enumerate(self._num_owners):
            assert owned[page] == num_owners, f"page {page} has {owned[page]} owners, not {num_owners}"
            assert num_owners <= 1 or page in self._key_of, f"page {page} is shared, but was not published"
        assert all(page in self._key_of for page in self._cached), "a cached page of no known content"
        assert not any(page in self._key_of for page in self._free), "a free page of known content"
        assert self._page_of == {key: page for page, key in self._key_of.items()}, "keys and pages disagree"

    def _evict(self) -> int:
        """The cached page let go longest ago; its content is not known any more."""
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def _let_go(self, page: int) -> None:
        self._num_owners[page] -= 1
        assert self._num_owners[page] >= 0, f"page {page} is let go of once too often"
        if self._num_owners[page] > 0:
            return
        if page in self._key_of:
            self._cached[page] = None
        else:
            self._free.append(page)
