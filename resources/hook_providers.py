"""The hook providers that ship: SQL, a webhook, and a query that must yield one number."""

import http.client
import ipaddress
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dpone_dagster.errors import DponeError
from dpone_dagster.governance.hooks import ProviderFactory
from dpone_dagster.ports import HookContext, HookDefinition, SqlRunner

WEBHOOK_SECONDS = 30  # a notification holds a load up no longer, whatever its timeout_seconds allows
_STATUS = {"pre_hook": "started", "post_hook": "loaded"}


class SqlHook:
    """Runs the hook's SQL on its connector's engine. A body that only reads runs where nothing can be written."""

    def __init__(self, context: HookContext) -> None:
        self._context = context

    def run(self, definition: HookDefinition, *, runner: SqlRunner | None) -> Mapping[str, int | str | None]:
        """Run it; return ``statements`` and ``affected_rows``, None where the engine does not say."""
        sql, engine = _needed(definition, runner)
        rows = engine.execute(
            sql,
            autocommit=definition.hook.autocommit,
            read_only=not definition.mutates,
            timeout_seconds=definition.hook.timeout_seconds,
        )
        return {"statements": definition.statements, "affected_rows": rows}


class DataQualityProbe:
    """Runs one reading query and compares its number with ``expect``."""

    def __init__(self, context: HookContext) -> None:
        self._context = context

    def run(self, definition: HookDefinition, *, runner: SqlRunner | None) -> Mapping[str, int | str | None]:
        """Run it; return ``expected`` and ``found``.

        Raises:
            DponeError: DPONE_HOOK_FAILED when they differ; NULL differs from every number.
        """
        sql, engine = _needed(definition, runner)
        found = engine.query_number(sql, timeout_seconds=definition.hook.timeout_seconds)
        expected = definition.hook.expect
        if found is None or found != expected:
            raise DponeError(
                "DPONE_HOOK_FAILED",
                f"The probe found {'NULL' if found is None else found}, and {expected} is expected.",
                expected=expected,
                found=found,
                repeatable=False,
            )
        return {"expected": expected, "found": found}


class WebhookHook:
    """Posts ``{"hook", "process", "run_id", "status"}`` to the address in an environment variable.

    The address is a secret: it is read when the hook runs, and never shown. ``status`` is ``started`` before the
    extraction and ``loaded`` after the load. Redirections are not followed.
    """

    def __init__(self, context: HookContext) -> None:
        self._context = context

    def run(self, definition: HookDefinition, *, runner: SqlRunner | None) -> Mapping[str, int | str | None]:
        """Post it; return ``http_status``.

        Raises:
            DponeError: DPONE_HOOK_FAILED when the receiver refuses it or was not reached; DPONE_ENGINE_UNAVAILABLE
                when no answer came.
        """
        hook = definition.hook
        address, loopback = _address(hook.webhook)
        body = {
            "hook": hook.id,
            "process": self._context.process,
            "run_id": self._context.run_id,
            "status": _STATUS[definition.phase],
        }
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked in _address
            address, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        # What is on this machine is not asked for through a proxy.
        handlers: list[Any] = [_NoRedirect, *([urllib.request.ProxyHandler({})] if loopback else [])]
        opener = urllib.request.build_opener(*handlers)
        try:
            with opener.open(request, timeout=min(hook.timeout_seconds, WEBHOOK_SECONDS)) as answer:
                return {"http_status": answer.status}
        except urllib.error.HTTPError as error:
            error.close()
            raise DponeError(
                "DPONE_HOOK_FAILED",
                f"The receiver answered with the HTTP status {error.code}.",
                http_status=error.code,
                repeatable=error.code in (429, 503),
            ) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError | socket.gaierror | ssl.SSLCertVerificationError):
                raise DponeError(
                    "DPONE_HOOK_FAILED",
                    f"The receiver could not be reached ({type(error.reason).__name__}).",
                    repeatable=True,
                ) from None
            raise _no_answer(error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(error) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow nothing; the redirection becomes the answer."""


BUILTINS: dict[str, ProviderFactory] = {
    "data_quality_probe": DataQualityProbe,
    "sql": SqlHook,
    "webhook": WebhookHook,
}


def _needed(definition: HookDefinition, runner: SqlRunner | None) -> tuple[str, SqlRunner]:
    if definition.sql is None or runner is None:
        raise DponeError(
            "DPONE_HOOK_ENGINE_MISSING", f"{definition.phase}.{definition.hook.id} has no SQL, or no engine to run it."
        )
    return definition.sql, runner


def _address(variable: str | None) -> tuple[str, bool]:
    """Return the address, and whether it is on this machine."""
    address = os.environ.get(variable or "", "")
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.username is not None or parts.scheme not in ("http", "https"):
        raise DponeError(
            "DPONE_HOOK_FAILED",
            f"The environment variable {variable} holds no https address without a user name.",
            repeatable=True,
        )
    loopback = _is_loopback(host)
    if parts.scheme == "http" and not loopback:
        raise DponeError(
            "DPONE_HOOK_FAILED", f"The address in {variable} is http, which is for this machine only.", repeatable=True
        )
    return address, loopback


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_answer(error: object) -> DponeError:
    return DponeError(
        "DPONE_ENGINE_UNAVAILABLE",
        f"The receiver of a webhook did not answer ({type(error).__name__}).",
        next_step="Ask the receiver whether the notification arrived.",
    )
