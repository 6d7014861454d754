"""The admin port of a dedicated server: what its operator can see and do, over HTTP (docs/server.md)."""

from poseidon.admin.address import Address, read_token
from poseidon.admin.client import AdminClient
from poseidon.admin.http_server import AdminServer
from poseidon.admin.service import AdminService, Served

__all__ = ["Address", "AdminClient", "AdminServer", "AdminService", "Served", "read_token"]
