"""Names for prefixes: the key of a page stands for its tokens and all tokens before it, in one namespace.

    key of page i = sha256(key of page i - 1, tokens of page i);    key "before page 0" = sha256(namespace)

K/V at a position depend on the tokens up to it only, so two pages of equal key hold the same numbers, whoever
computed them. A collision would show one client another's text: hence sha256, not a fast hash.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256


class KeyChain:
    """The keys of one request's pages; tokens only grow, so they are computed once."""

    __slots__ = ("_keys", "_page_size", "_root")

    def __init__(self, cache_salt: str, page_size: int) -> None:
        self._root = sha256(cache_salt.encode()).digest()
        self._page_size = page_size
        self._keys: list[bytes] = []

    def upto(self, tokens: Sequence[int], num_tokens: int, first_page: int = 0) -> list[bytes]:
        """The keys of the pages that the first `num_tokens` of `tokens` fill, from one of them on."""
        keys, page_size = self._keys, self._page_size
        num_full = num_tokens // page_size
        for index in range(len(keys), num_full):
            parent = keys[-1] if keys else self._root
            page = array("Q", tokens[index * page_size : (index + 1) * page_size])
            keys.append(sha256(parent + page.tobytes()).digest())
        return keys[first_page:num_full]
