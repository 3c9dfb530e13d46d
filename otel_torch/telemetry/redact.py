"""Makes what a server says fit to print: nothing that a terminal executes, no secret of a header.

A server that denies access may repeat the request in its answer, with its credentials.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

# characters of a server's text that are looked at
_READ = 2000
# a value this short is no secret, and as part of a word it is found anywhere
_SHORTEST = 4
# a secret that is cut off is recognized by as many characters
_PREFIX = 8
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_HIDDEN = "…"


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the beginning of a server's text in one line of printable characters, without the
    secrets of the standard variables, however they are encoded.

    >>> headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer abcdefgh"}
    >>> redact("\\x1b[31mno\\n Bearer abcdefgh", headers)
    '[31mno …'
    """
    is_cut = len(text) > _READ
    text = "".join(char for char in text[:_READ] if char.isprintable() or char.isspace())
    text = " ".join(text.split())
    secrets = _secrets(tuple(_secret_values(environ)))
    if not secrets:
        return text
    text = re.sub("|".join(map(_pattern, secrets)), _HIDDEN, text, flags=re.IGNORECASE)
    # the end of a text that was cut may hold the beginning of a secret
    return text[: -len(secrets[0])] if is_cut else text


def _pattern(secret: str) -> str:
    whole = re.escape(secret)
    return f"{whole}|{re.escape(secret[:_PREFIX])}[^\\s\"',;]*" if len(secret) > _PREFIX else whole


def _secret_values(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of headers, and what of URLs is not host and port."""
    for name, value in environ.items():
        if re.fullmatch(r"OTEL_EXPORTER_OTLP_(\w+_)?HEADERS", name):
            for pair in value.split(","):
                yield pair.partition("=")[2].strip()
        elif re.fullmatch(r"OTEL_EXPORTER_OTLP_(\w+_)?ENDPOINT", name) or name.upper() in _PROXIES:
            yield from _secrets_of_url(value)


def _secrets_of_url(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        user, password = parts.username, parts.password
    except ValueError:
        return
    if user is not None:
        yield unquote(user)
        yield f"{unquote(user)}:{unquote(password or '')}"
    if password is not None:
        yield unquote(password)
    yield from (value for _, value in parse_qsl(parts.query))
    yield from (part for part in parts.path.split("/") if len(part) > _PREFIX)


@lru_cache(4)
def _secrets(values: tuple[str, ...]) -> list[str]:
    """Return every form of the values, longest first."""
    forms = {form for value in values for part in _parts(value) for form in _encodings(part)}
    return sorted((form for form in forms if len(form) >= _SHORTEST), key=len, reverse=True)


def _parts(value: str) -> Iterator[str]:
    """Yield a header's value, its words without the scheme (`Bearer X`), and what they encode."""
    for text in {value, unquote(value)}:
        yield text
        scheme, *words = text.split() or [""]
        for word in words if words else [scheme]:
            yield word
            yield from _decoded(word)


def _decoded(word: str) -> Iterator[str]:
    """Yield user and password of a `Basic` header."""
    try:
        text = base64.b64decode(word, validate=True).decode()
    except (binascii.Error, ValueError):
        return
    yield from (text, *text.split(":"))


def _encodings(text: str) -> Iterator[str]:
    yield from (text, quote(text, safe=""), quote_plus(text), ascii(text)[1:-1])
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(text.encode()).decode().rstrip("=")
