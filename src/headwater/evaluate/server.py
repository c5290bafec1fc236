"""A running server, asked one thing at a time by each thread."""

from __future__ import annotations

from typing import Any

import httpx

from headwater.errors import HeadwaterError
from headwater.evaluate.answered import Answered, Json, answered_of
from headwater.load.endpoint import CHAT, COMPLETIONS, about, base_url, first_model, headers, refusal_text

CONNECT = 10.0  # seconds


class ServerFault(HeadwaterError):
    """The server refused or failed; `status` is None where it could not be reached."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """Its requests name the model and are greedy. May be used by several threads."""

    def __init__(self, url: str, api_key: str | None, model: str | None, timeout: float) -> None:
        """Asks the server what it is; raises ServerFault if nobody answers, ValueError for what is no URL."""
        self.url = base_url(url)
        try:
            self.about = about(url, api_key, min(timeout, CONNECT))
        except httpx.HTTPError as error:
            raise ServerFault(f"{url}: {error}") from error
        self.model = model or first_model(self.about)
        limits = httpx.Timeout(timeout, connect=CONNECT)
        self._client = httpx.Client(base_url=self.url, headers=headers(api_key), timeout=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def chat(self, fields: Json) -> Json:
        """A whole chat completion. Raises ServerFault."""
        return self._generated(CHAT, fields)

    def complete(self, fields: Json) -> Json:
        """A whole completion. Raises ServerFault."""
        return self._generated(COMPLETIONS, fields)

    def answered(self, item: int, column: str, fields: Json) -> Answered:
        """A chat completion for an item; what went wrong is an outcome."""
        try:
            return answered_of(item, column, self.chat(fields))
        except ServerFault as error:
            refused = error.status is not None and 400 <= error.status < 500
            return Answered(item, column, "refused" if refused else "error", str(error))

    def _generated(self, path: str, fields: Json) -> Json:
        body = self.post(path, {"model": self.model, "temperature": 0, **fields})
        if not isinstance(body, dict):
            raise ServerFault(f"{self.url}{path}: the answer is {str(body)[:80]!r}, must be an object")
        return body

    def post(self, path: str, body: Json) -> Any:
        """Raises ServerFault."""
        try:
            response = self._client.post(path, json=body)
            if response.is_success:
                return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerFault(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        raise ServerFault(refusal_text(response.content, response.status_code), response.status_code)
