"""Options of object stores, by URL, for all that this process reads and writes there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from .urls import is_url, place_of

__all__ = ["options_of", "secrets", "configure_storage"]

#: Names of options and of environment variables whose values are credentials.
_SECRET = re.compile("secret|token|key|sas|password|credential|signature", re.IGNORECASE)
#: A shorter value is a word that texts have anyway.
_LEAST_SECRET_CHARS = 8

_BY_ROOT: dict[str, dict[str, Any]] = {}


def configure_storage(url: str, **options: Any) -> None:
    """Set options, such as credentials or an endpoint, for all URLs of one bucket in this process.

    Call it on every rank that uses the URL. Without it, a store is configured from the usual environment variables:
    ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE`` (with boto3 installed), ``AWS_ENDPOINT_URL``, ``AWS_REGION``,
    ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` and so on. A second call for the same bucket replaces the first.

    ``options`` are those of obstore's stores, with the same names: ``endpoint``, ``region``, ``access_key_id``,
    ``secret_access_key``, ``skip_signature`` (anonymous), ``credential_provider``, ``retry_config``, ``client_options``
    (``timeout``, ``connect_timeout``, ``proxy_url``, …). For other URLs, they are those of the fsspec file system. Options are neither
    written to disk nor logged, and don't appear in reports or errors.

    Raises :class:`ValueError` for a path that isn't a URL, and :class:`SourceError` for a URL without a bucket, or with a user, a password
    or a query.

    Source: https://developmentseed.github.io/obstore/latest/api/store/
    """
    if not is_url(url):
        raise ValueError(f"configure_storage takes a URL like s3://bucket, got {url!r}")
    _BY_ROOT[place_of(url).root] = dict(options)


def options_of(root: str) -> dict[str, Any]:
    """The options that were set for a root."""
    return dict(_BY_ROOT.get(root, {}))


def secrets() -> list[str]:
    """The values of options and of environment variables whose names say that they are credentials, the longest first."""
    given = [item for options in _BY_ROOT.values() for item in _texts(options)]
    given += [item for item in os.environ.items() if item[0].startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_"))]
    found = {value for name, value in given if _SECRET.search(name) and len(value) >= _LEAST_SECRET_CHARS}
    return sorted(found, key=len, reverse=True)


def _texts(options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _texts(value)
        elif isinstance(value, str):
            yield name, value
