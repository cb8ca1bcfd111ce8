"""The server engine: any OpenAI-compatible server (vLLM, SGLang ...) answers, many requests at a time.

What may pass is tried again, with growing waits; what is the row's fault rejects the row; what is the user's or the
server's fault for good stops the run, which the same command continues. The server's own defaults for anything but
temperature and top-p stay in force: start vLLM with ``--generation-config vllm`` if these two alone should count.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx

from data.regenerate.replay import Answer, Asked, Outcome, Replay, Sampling
from models.errors import EyasError

RETRIED = frozenset({408, 409, 425, 429})  # and every 5xx
LONGEST_BACKOFF = 60.0  # seconds; a server's Retry-After may ask for more
STARTUP_TIMEOUT = 30.0  # seconds for the list of models
FAILURES_IN_A_ROW = 8  # at least, or as many as requests in flight: then it is not the rows' fault

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request


class RequestRefused(Exception):
    """The server can't answer this row: ``prompt_too_long`` or ``request_refused``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class RequestFailed(Exception):
    """No usable response after all retries."""


class _Attempt(NamedTuple):
    """A response, or what went wrong and the seconds the server asks to wait."""

    completion: dict[str, Any] | None
    problem: str = ""
    wait: float = 0.0


class ServerEngine:
    """Answers through ``POST {base}/chat/completions``.

    base: URL up to ``/v1``. model: the server's name of it; None: the only one there is. template_kwargs: sent as
    chat_template_kwargs. key_env: environment variable with the key, sent but never logged or stored. timeout:
    seconds of one request. backoff: seconds before the first retry, doubled each time and spread by chance.

    Raises EyasError if the server is not there, refuses the key or doesn't serve the model.
    """

    def __init__(
        self,
        base: str,
        model: str | None,
        sampling: Sampling,
        *,
        key_env: str = "OPENAI_API_KEY",
        cut: str = "drop",
        template_kwargs: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        retries: int = 5,
        timeout: float = 600.0,
        backoff: float = 1.0,
    ) -> None:
        self._base, self._key_env = _checked(base), key_env
        self._sampling, self._cut, self._kwargs = sampling, cut, dict(template_kwargs or {})
        self._concurrency, self._retries, self._timeout, self._backoff = concurrency, retries, timeout, backoff
        self._model = self._find_model(model)
        self.settings: dict[str, Any] = {"target": self._model, "engine": "server", **sampling.settings(), "cut": cut}
        self.settings["template_kwargs"] = self._kwargs

    def answer(
        self,
        asked: Iterable[Asked],
        done: Container[int],
        emit: Callable[[Outcome], None],
        count: Callable[[int], None],
    ) -> None:
        """See :class:`data.regenerate.replay.Engine`."""
        missing = (row for row in asked if row.index not in done)
        asyncio.run(self._answer(missing, _Gate(emit, max(self._concurrency, FAILURES_IN_A_ROW)), count))

    async def _answer(self, missing: Iterator[Asked], gate: _Gate, count: Callable[[int], None]) -> None:
        limits = httpx.Limits(max_connections=self._concurrency)
        # The time limit is that of the whole request, see _attempt.
        async with httpx.AsyncClient(headers=self._headers(), timeout=None, limits=limits) as client:

            async def work() -> None:
                for row in missing:  # shared: every worker takes the next row
                    await self._converse(client, row, gate, count)

            workers = [asyncio.create_task(work()) for _ in range(self._concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        if gate.held:
            self._find_model(self._model)  # EyasError if the server is gone: then the rows are not to blame
            gate.open()

    async def _converse(self, client: httpx.AsyncClient, row: Asked, gate: _Gate, count: Callable[[int], None]) -> None:
        """All turns of one row."""
        replay, failed = Replay(row, self._cut), False
        while replay.open:
            try:
                completion = await self._complete(client, self._request(replay))
            except RequestRefused as refusal:
                replay.end(refusal.reason, refusal.detail)
                failed = refusal.reason == "request_refused"
            except RequestFailed as failure:
                replay.end("no_response", str(failure))
                failed = True
            else:
                count(_tokens_of(completion))
                replay.take(_answer_of(completion))
        gate.put(replay.outcome(self.settings), failed, replay.detail)

    def _request(self, replay: Replay) -> dict[str, Any]:
        sampling = self._sampling
        stream = hashlib.blake2b(sampling.stream(replay.asked.id, len(replay.answers)).encode(), digest_size=8).digest()
        request = {
            "model": self._model,
            "messages": replay.messages(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": int.from_bytes(stream) % 2**31,
        }
        return request | ({"chat_template_kwargs": self._kwargs} if self._kwargs else {})

    async def _complete(self, client: httpx.AsyncClient, request: Mapping[str, Any]) -> dict[str, Any]:
        """The completion. Raises RequestRefused, RequestFailed, and EyasError if no request can succeed."""
        for attempt in range(self._retries + 1):
            result = await self._attempt(client, request)
            if result.completion is not None:
                return result.completion
            log.debug("attempt %d: %s", attempt + 1, result.problem)
            if attempt < self._retries:
                backoff = min(LONGEST_BACKOFF, self._backoff * 2**attempt)
                await asyncio.sleep(max(result.wait, backoff * random.uniform(0.5, 1.5)))
        raise RequestFailed(f"{self._retries + 1} attempts, the last: {result.problem}")

    async def _attempt(self, client: httpx.AsyncClient, request: Mapping[str, Any]) -> _Attempt:
        try:
            async with asyncio.timeout(self._timeout):
                response = await client.post(f"{self._base}/chat/completions", json=request)
        except TimeoutError:
            return _Attempt(None, f"no response within regenerate.timeout={self._timeout:g} seconds")
        except httpx.RequestError as error:
            return _Attempt(None, f"{type(error).__name__}: {error}")
        if response.status_code in RETRIED or response.status_code >= 500:
            return _Attempt(None, _said(response), retry_after(response.headers.get("Retry-After")))
        if response.status_code in (401, 403):
            raise EyasError(self._key_refused(response))
        if response.status_code == 404:
            raise EyasError(f"regenerate.model={self._model}: {self._base}/chat/completions says {_said(response)}")
        if not response.is_success:
            said = _said(response)
            raise RequestRefused("prompt_too_long" if "context" in said.lower() else "request_refused", said)
        completion = _json(response)
        usable = _choice(completion) is not None
        return _Attempt(completion) if usable else _Attempt(None, f"not a chat completion: {response.text[:200]!r}")

    # --- at start-up ------------------------------------------------------------------------------------------------

    def _find_model(self, wanted: str | None) -> str:
        served = self._served()
        if wanted is None and len(served) == 1:
            return served[0]
        if wanted in served:
            return str(wanted)
        there = f"{self._base} serves {', '.join(served) or 'nothing'}"
        raise EyasError(f"regenerate.model={'null' if wanted is None else wanted}: {there}; give one of these")

    def _served(self) -> list[str]:
        """Names of the models that the server lists."""
        url = f"{self._base}/models"
        try:
            response = httpx.get(url, headers=self._headers(), timeout=min(self._timeout, STARTUP_TIMEOUT))
        except httpx.RequestError as error:
            raise EyasError(
                f"regenerate.server={self._base}: no server answers there ({type(error).__name__}: {error}). "
                "Start it, or leave regenerate.server out to answer with transformers"
            ) from None
        if response.status_code in (401, 403):
            raise EyasError(self._key_refused(response))
        listed = _json(response).get("data") if response.is_success else None
        if not isinstance(listed, list):
            hint = "" if self._base.endswith("/v1") else "; such servers mostly listen at a URL that ends in /v1"
            raise EyasError(f"regenerate.server={self._base}: {url} lists no models ({_said(response)}){hint}")
        return [str(model["id"]) for model in listed if isinstance(model, dict) and "id" in model]

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self._key_env, "").strip()
        if not (key.isascii() and key.isprintable()):  # refused by HTTP, with a message that shows it
            raise EyasError(f"regenerate.api_key_env={self._key_env}: holds characters that no key has")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _key_refused(self, response: httpx.Response) -> str:
        given = "holds a key that is refused" if os.environ.get(self._key_env) else "is not set"
        return (
            f"regenerate.server={self._base}: wants another key (HTTP {response.status_code}); "
            f"the environment variable {self._key_env} (regenerate.api_key_env) {given}"
        )


class _Gate:
    """Lets outcomes through, but holds failures back until a success shows that the server works at all.

    Raises EyasError at ``limit`` failures in a row: they are not written, and the same command asks them again.
    """

    def __init__(self, emit: Callable[[Outcome], None], limit: int) -> None:
        self._emit, self._limit = emit, limit
        self.held: list[Outcome] = []

    def put(self, outcome: Outcome, failed: bool, detail: str) -> None:
        if not failed:
            self.open()
            self._emit(outcome)
            return
        self.held.append(outcome)
        if len(self.held) >= self._limit:
            raise EyasError(
                f"regenerate.server: {len(self.held)} rows in a row without an answer, the last: {detail}. "
                "The same command asks them again"
            )

    def open(self) -> None:
        """Write what is held back."""
        for outcome in self.held:
            self._emit(outcome)
        self.held.clear()


def retry_after(header: str | None, now: datetime | None = None) -> float:
    """Seconds to wait by a Retry-After header, which is a number or a date; 0 without one that can be read."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def _checked(base: str) -> str:
    """The base URL without a slash at its end. A key in it would be stored with the configuration."""
    try:
        url = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise EyasError(f"regenerate.server={base}: not a URL ({error})") from None
    if url.userinfo:
        raise EyasError(
            "regenerate.server: has a user name or key in it; put the key into the environment variable that "
            "regenerate.api_key_env names"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise EyasError(f"regenerate.server={base}: give a URL such as http://localhost:8000/v1")
    return base.rstrip("/")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _said(response: httpx.Response) -> str:
    """``HTTP 400: message``, the message out of an OpenAI-style error if it is one."""
    value = _json(response)
    error = value.get("error", value)
    message = error.get("message") if isinstance(error, dict) else error
    return f"HTTP {response.status_code}: {message if isinstance(message, str) else response.text[:200]}".strip()


def _choice(completion: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first choice, if it is one with a message."""
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        return None
    content = choice["message"].get("content")
    return choice if content is None or isinstance(content, str) else None


def _tokens_of(completion: Mapping[str, Any]) -> int:
    """Tokens generated, as far as the server says."""
    usage = completion.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0


def _answer_of(completion: Mapping[str, Any]) -> Answer:
    choice = _choice(completion)
    assert choice is not None
    message, reason = choice["message"], choice.get("finish_reason")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, str) else ""
    text = message.get("content") or ""
    # The blank lines between reasoning and answer are the reasoning's; whoever joins the two writes them again.
    return Answer(text.lstrip("\n") if reasoning else text, str(reason), reasoning)
