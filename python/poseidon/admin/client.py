"""What commands ask an admin port."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote

from poseidon.admin.address import Address
from poseidon.errors import PoseidonError, Refused, Unreachable

_TIMEOUT_S = 10.0
_MOST_BYTES = 256 << 20  # of an answer


class HttpClient:
    """Asks one admin port. Raises Unreachable if none answers there, and Refused with the port's reason.

    `program` is the command that has such a port, for errors.
    """

    def __init__(self, address: Address, token: str | None, program: str) -> None:
        self._address = address
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._program = program

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """The answer to a request, an object of JSON."""
        connection = http.client.HTTPConnection(self._address.host, self._address.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            answer = json.loads(response.read(_MOST_BYTES))
        except OSError as error:
            raise Unreachable(
                f"no admin port answers at {self._address} ({error.strerror or error}): start "
                f"`{self._program} --admin PORT` there, and give the same address to this command"
            ) from None
        except (http.client.HTTPException, ValueError, RecursionError):
            raise PoseidonError(self._stranger()) from None
        finally:
            connection.close()
        if not isinstance(answer, dict) or (response.status != http.client.OK and "error" not in answer):
            raise PoseidonError(self._stranger())
        if response.status != http.client.OK:
            raise Refused(str(answer["error"]))
        return answer

    def _stranger(self) -> str:
        return (
            f"what answers at {self._address} is no admin port of `{self._program}`: give the address that this "
            "command printed when it started"
        )


class AdminClient(HttpClient):
    """Asks the admin port of a dedicated server."""

    def __init__(self, address: Address, token: str | None = None) -> None:
        super().__init__(address, token, "poseidon server")

    def jobs(self) -> dict[str, Any]:
        """What the server knows of itself and its jobs."""
        return self.ask("GET", "/jobs")

    def drain(self) -> dict[str, Any]:
        """Makes the server take no new job. The answer is as that of `jobs`."""
        return self.ask("POST", "/drain")

    def evict(self, job: str, secret: int | None = None) -> dict[str, Any]:
        """Ends a job. `secret` says which one if several tenants have a job of this name."""
        query = "" if secret is None else f"?secret={secret}"
        return self.ask("POST", f"/jobs/{quote(job, safe='')}/evict{query}")
