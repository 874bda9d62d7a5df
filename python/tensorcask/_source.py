"""Locations of stores: URLs, stores of obstore, and credentials that are fetched when they are needed."""

from __future__ import annotations

import datetime
import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import _native
from ._errors import InvalidTypeError

# A function without arguments that returns credentials, as obstore defines it, or a `boto3.Session`.
CredentialProvider = Callable[[], Mapping[str, Any]] | Any

# Names of credentials: those of a provider, and those of the object store.
_NAMES = {
    "s3": {"access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key", "token": "aws_session_token"},
    "az": {
        "account_name": "azure_storage_account_name",
        "account_key": "azure_storage_account_key",
        "sas_token": "azure_storage_sas_key",
        "token": "azure_storage_token",
    },
}
_SCHEMES = {"s3": "s3", "s3a": "s3", "az": "az", "abfs": "az", "abfss": "az", "azure": "az", "adl": "az"}
_LASTS_SECONDS = 600
_EARLY_SECONDS = 300


def of_obstore(store: Any) -> tuple[str, dict[str, str], CredentialProvider | None]:
    """Returns the URL, configuration and credential provider of a store of obstore."""
    kind = type(store).__name__
    config = {**(getattr(store, "config", None) or {}), **(getattr(store, "client_options", None) or {})}
    prefix = getattr(store, "prefix", None)
    if kind == "LocalStore":
        if prefix is None:
            raise _native.InvalidArgumentError("a LocalStore without a prefix; create it with the folder of the run: LocalStore(FOLDER)")
        return str(prefix), {}, None
    schemes = {"S3Store": ("s3", "bucket"), "GCSStore": ("gs", "bucket"), "AzureStore": ("az", "container_name")}
    if kind not in schemes:
        raise _native.UnsupportedError(f"obstore's {kind}: use a LocalStore, S3Store, GCSStore or AzureStore, or a URL")
    scheme, key = schemes[kind]
    plain = {name: str(value) for name, value in config.items() if name != key}
    url = f"{scheme}://{config[key]}" + (f"/{str(prefix).strip('/')}" if prefix else "")
    return url, plain, getattr(store, "credential_provider", None)


def is_obstore(value: Any) -> bool:
    """Whether a value is a store of obstore, which need not be installed."""
    return any(base.__module__.split(".")[0] == "obstore" for base in type(value).__mro__)


def check_url(url: Any) -> str:
    """Returns a path or URL as text. The error for anything else shows the order of arguments, which may be swapped."""
    if isinstance(url, (str, os.PathLike)):
        text = os.fspath(url)
        if isinstance(text, str):
            return text
    shown = repr(url) if isinstance(url, (int, float, bytes, type(None))) else f"a {type(url).__qualname__}"
    raise InvalidTypeError(
        f"url: {shown}; use a path, a URL or a Store. The order of arguments is save(state, url, step=...) and load(url, step)"
    )


class Credentials:
    """Credentials of a provider, and the time until which they are used."""

    def __init__(self, url: str, provider: CredentialProvider) -> None:
        scheme = url.partition("://")[0] if "://" in url else "file"
        if scheme not in _SCHEMES:
            raise _native.UnsupportedError(f"credential_provider works for s3:// and az://, not for {scheme}://. Use config=")
        self._names = _NAMES[_SCHEMES[scheme]]
        self._provider = provider
        self._until = 0.0

    @property
    def are_old(self) -> bool:
        """Whether it is time to ask the provider again."""
        return time.time() >= self._until

    def ask(self) -> dict[str, str]:
        """Asks the provider, and returns its credentials as settings of the object store."""
        provider: Any = self._provider
        if hasattr(provider, "get_credentials"):
            found = provider.get_credentials()
            if found is None:
                raise _native.InvalidArgumentError(f"{self._provider!r} has no credentials")
            frozen = found.get_frozen_credentials()
            told: Mapping[str, Any] = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}
        else:
            told = self._provider()
        if inspect.isawaitable(told):
            getattr(told, "close", lambda: None)()
            raise InvalidTypeError("credential_provider is asynchronous; use a function that returns credentials")
        if not isinstance(told, Mapping):
            raise InvalidTypeError(f"credential_provider returned {type(told).__name__}, not a mapping")
        expires = told.get("expires_at")
        now = time.time()
        if isinstance(expires, datetime.datetime):
            # Early enough before they expire, but not at every use.
            left = expires.timestamp() - now
            self._until = now + max(left - _EARLY_SECONDS, left / 2, 1.0)
        else:
            self._until = now + _LASTS_SECONDS
        settings = {self._names[name]: str(value) for name, value in told.items() if name in self._names and value is not None}
        if not settings:
            raise _native.InvalidArgumentError(f"credential_provider returned no credentials; expected one of {', '.join(self._names)}")
        return settings


