"""The page about the API at /docs: it names each path and field, and loads nothing from other hosts."""

import re

from headwater.server.routes.info import type_of
from tests.server.client import send_all


def test_page_names_every_path_and_every_field(engine):
    page, described = send_all(engine, [("GET", "/docs", {}), ("GET", "/openapi.json", {})])
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, operations in described.json()["paths"].items():
        for method in operations:
            assert f"<h2>{method.upper()} {path}</h2>" in page.text
    for field in ("repetition_penalty", "structured_outputs", "messages", "cache_salt"):
        assert f"<td>{field}</td>" in page.text


def test_page_works_without_a_network(engine):
    (page,) = send_all(engine, [("GET", "/docs", {})])
    linked = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert linked
    assert all(link.startswith("/") for link in linked)
    links = send_all(engine, [("GET", link, {}) for link in linked])
    assert [link.status_code for link in links] == [200] * len(linked)


def test_reference_page_describes_types_in_few_words():
    assert type_of({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5000}, {"type": "null"}]}) == (
        "integer from 0 to 5,000"
    )
    assert type_of({"type": "array", "items": {"enum": ["a", "b"]}}) == "list of a or b"
    assert type_of({"$ref": "#/components/schemas/Tool"}) == "Tool"
    assert type_of({}) == "any"
