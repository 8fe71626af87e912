"""The OpenAPI document, and the page made of it."""

import re

import msgspec
import pytest
from support.gateway_fakes import in_loop
from support.http_fakes import http_gateway

from quartet.services.gateway.http import requests
from quartet.services.gateway.http.openapi import OPERATIONS


@in_loop
async def test_the_document_describes_every_route_and_refers_to_what_is_there():
    async with http_gateway(api_key_hashes=["0" * 64]) as secured, http_gateway(call_timeout=0.05) as gateway:
        reply = await gateway.call("GET", "/openapi.json")
        document = reply.json()
        assert document["openapi"].startswith("3.1") and "security" not in document
        references = set(re.findall(rb'"#/components/schemas/(\w+)"', reply.body))
        assert {name.decode() for name in references} <= set(document["components"]["schemas"])
        for operation in OPERATIONS:
            described = document["paths"][operation.path][operation.method]
            assert described["summary"] and "200" in described["responses"]
            path = operation.path.replace("{name}", "tiny")
            assert (await gateway.call(operation.method.upper(), path)).status not in (404, 405)
        assert (await secured.call("GET", "/openapi.json")).status == 401
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert set(fields) == set(requests.ChatCompletionRequest.__struct_fields__)


@pytest.mark.parametrize("kind", [requests.CompletionRequest, requests.ChatCompletionRequest])
def test_every_field_but_the_messages_may_be_null(kind):
    names = [name for name in kind.__struct_fields__ if name != "messages"]
    body = dict.fromkeys(names) | ({"messages": []} if kind is requests.ChatCompletionRequest else {})
    assert msgspec.json.decode(msgspec.json.encode(body), type=kind)


@in_loop
async def test_the_page_needs_nothing_from_elsewhere():
    async with http_gateway() as gateway:
        reply = await gateway.call("GET", "/docs")
        text = reply.body.decode()
        assert reply.headers["content-type"].startswith("text/html")
        assert "<script" not in text and "src=" not in text and "//" not in re.sub(r"/\*.*?\*/", "", text)
        anchors = set(re.findall(r'href="#(\w+)"', text))
        assert anchors <= set(re.findall(r'id="(\w+)"', text))
        for operation in OPERATIONS:
            assert operation.path in text
