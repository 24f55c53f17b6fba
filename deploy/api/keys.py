"""API keys: who calls, how much they may ask for, and with whom they share cached prefixes.

A key is known here by its sha256 alone, so that nothing that prints or stores these objects can give it away.
A line of a key file is a key, or a name, a key and limits; `#` begins a comment:

    sk-3f0c...
    alice  sk-91b7...  requests_per_min=60 tokens_per_min=100000
    carol  sha256:6f1e...                      (the hash of a key, in hexadecimal)
    ops    sk-77aa...  admin                   (for the admin port, and for nothing else)

PACELINE_API_KEYS and PACELINE_ADMIN_KEYS hold such lines too, with commas between them.
"""

import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from ...cluster.errors import ConfigError, RequestError

KEYS_VARIABLE = "PACELINE_API_KEYS"
ADMIN_KEYS_VARIABLE = "PACELINE_ADMIN_KEYS"
MIN_KEY_LEN = 8
MAX_HEADER_LEN = 512

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = ("requests_per_min", "tokens_per_min")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key."""

    name: str
    digest: bytes  # sha256 of the key
    requests_per_min: int | None = None
    tokens_per_min: int | None = None  # of prompts and output together
    is_admin: bool = False

    def __repr__(self) -> str:
        return f"ApiKey({self.name})"


class Bucket:
    """So much a minute, a minute's worth at once; taking more than is there leaves a debt to wait off."""

    def __init__(self, per_min: int, now: float) -> None:
        self.per_min = per_min
        self._level = float(per_min)
        self._at = now

    def level(self, now: float) -> float:
        """What is left; below zero for a debt."""
        self._level = min(float(self.per_min), self._level + (now - self._at) * self.per_min / 60)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait_s(self, least: float, now: float) -> float:
        """Until there is `least` again; 0 when there is."""
        return max(0.0, least - self.level(now)) * 60 / self.per_min


class Caller:
    """Who sent a request. One for all requests of a key, so that its limits hold over all of them."""

    def __init__(self, key: ApiKey | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = "" if key is None else key.name
        self._clock = clock
        now = clock()
        requests, tokens = (None, None) if key is None else (key.requests_per_min, key.tokens_per_min)
        self._requests = None if requests is None else Bucket(requests, now)
        self._tokens = None if tokens is None else Bucket(tokens, now)

    def admit(self) -> None:
        """Count one request. Raises RequestError 429 when it is too much for this key."""
        now = self._clock()
        wait_s, what = 0.0, ""
        if self._requests is not None and (pause_s := self._requests.wait_s(1.0, now)) > wait_s:
            wait_s, what = pause_s, f"{self._requests.per_min} requests"
        if self._tokens is not None and (pause_s := self._tokens.wait_s(1.0, now)) > wait_s:
            wait_s, what = pause_s, f"{self._tokens.per_min} tokens"
        if what:
            raise RequestError(
                f"key {self.name!r} may ask for {what} a minute; try again in {math.ceil(wait_s)} s",
                status=429,
                code="rate_limit_exceeded",
                error_type="rate_limit_error",
                retry_after_s=math.ceil(wait_s),
            )
        if self._requests is not None:
            self._requests.take(1.0, now)

    @classmethod
    def named(cls, name: str) -> "Caller":
        """The holder of a key, in whose name something is done that its limits do not count."""
        return cls(ApiKey(name=name, digest=b"")) if name else ANYONE

    @property
    def is_metered(self) -> bool:
        """Whether its tokens are counted."""
        return self._tokens is not None

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were read or made for this caller."""
        if self._tokens is not None and num_tokens:
            self._tokens.take(num_tokens, self._clock())

    def salt(self, cache_salt: str) -> str:
        """The namespace of its cached prefixes: callers never share one, whatever they ask for."""
        return f"{self.name}/{cache_salt}" if self.name else cache_salt

    def limits(self) -> dict[str, str]:
        """What is left, as OpenAI's headers say it."""
        now = self._clock()
        headers: dict[str, str] = {}
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{what}"] = str(bucket.per_min)
                headers[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level(now))))
        return headers


ANYONE = Caller(None)


class KeyRing:
    """The keys of one door. Without any it is open: everyone is the same caller."""

    def __init__(self, keys: Iterable[ApiKey] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = [(key.digest, Caller(key, clock)) for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._entries

    def check(self, header: str | None) -> Caller | None:
        """The caller of an `Authorization: Bearer KEY` header; None if that is no key of ours."""
        scheme, _, key = (header or "").partition(" ")
        if self.is_open:
            return ANYONE
        return self.check_key(key.strip()) if scheme.lower() == "bearer" else None

    def check_key(self, key: str) -> Caller | None:
        """The caller of a key. Takes as long for a wrong one as for a right one."""
        if self.is_open:
            return ANYONE
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Caller | None = None
        for known, caller in self._entries:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def load_keys(file: str | None, environ: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """The keys of a file and of the environment. Raises ConfigError; its text never holds a key."""
    keys: list[ApiKey] = []
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"the key file {file} cannot be read: {problem}") from None
        keys += _keys_of(lines, f"{file}, line", is_admin=False)
        if not keys:
            raise ConfigError(f"the key file {file} holds no key; write one on a line of its own")
    for variable, is_admin in ((KEYS_VARIABLE, False), (ADMIN_KEYS_VARIABLE, True)):
        keys += _keys_of(environ.get(variable, "").split(","), f"{variable}, entry", is_admin=is_admin)
    for what, values in (("name", [k.name for k in keys]), ("key", [k.digest for k in keys])):
        if len(set(values)) != len(values):
            raise ConfigError(f"two API keys have the same {what}; give each its own")
    return tuple(keys)


def require_admin_key(keys: Iterable[ApiKey]) -> None:
    """ConfigError unless one of the keys is for the admin port."""
    if not any(key.is_admin for key in keys):
        raise ConfigError(
            f"--admin-port needs a key: give {ADMIN_KEYS_VARIABLE}, or write admin behind one in the key file"
        )


def _keys_of(lines: Iterable[str], place: str, *, is_admin: bool) -> list[ApiKey]:
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            keys.append(_key_of(words, f"{place} {number}", is_admin))
    return keys


def _key_of(words: list[str], place: str, is_admin: bool) -> ApiKey:
    options = [word for word in words[1:] if word == "admin" or word.partition("=")[0] in _LIMITS]
    rest = words[: len(words) - len(options)]
    if not 1 <= len(rest) <= 2 or words[len(rest) :] != options:
        raise ConfigError(f"{place}: write KEY, or NAME KEY, then {', '.join(_LIMITS)} or admin")
    secret = rest[-1]
    if secret.startswith("sha256:"):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", secret[7:]):
            raise ConfigError(f"{place}: after sha256: write the 64 hexadecimal digits of a key's hash")
        digest = bytes.fromhex(secret[7:])
    elif len(secret) < MIN_KEY_LEN:
        raise ConfigError(f"{place}: a key has at least {MIN_KEY_LEN} characters")
    else:
        digest = hashlib.sha256(secret.encode()).digest()
    name = rest[0] if len(rest) == 2 else f"key-{digest.hex()[:8]}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: a name is up to 64 letters, digits, dots, dashes and underscores")
    return ApiKey(
        name=name,
        digest=digest,
        requests_per_min=_limit(options, "requests_per_min", place),
        tokens_per_min=_limit(options, "tokens_per_min", place),
        is_admin=is_admin or "admin" in options,
    )


def _limit(options: list[str], name: str, place: str) -> int | None:
    given = [option.partition("=")[2] for option in options if option.partition("=")[0] == name]
    if not given:
        return None
    if len(given) > 1 or not given[0].isdigit() or int(given[0]) < 1:
        raise ConfigError(f"{place}: write {name}=N once, with N a whole number above 0")
    return int(given[0])
