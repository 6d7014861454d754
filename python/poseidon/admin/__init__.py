"""Admin ports: what operators see of dedicated servers (docs/server.md) and workers (docs/watching.md), over HTTP."""

from poseidon.admin.address import Address, read_token
from poseidon.admin.answer import Answer, json_answer, text_answer, to_read
from poseidon.admin.client import AdminClient, HttpClient
from poseidon.admin.http_server import AdminServer
from poseidon.admin.prometheus import CONTENT_TYPE, Metric, families, labels
from poseidon.admin.service import AdminService, Served
