"""The page's files: how they are sent, that they are packaged, and that they need nothing from elsewhere."""

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from support.gateway_fakes import in_loop
from support.http_fakes import http_gateway

from quartet.services.gateway.http import static
from quartet.services.gateway.http.static import CONTENT_TYPES, page_files

ROOT = Path(__file__).parents[3]
FOLDER = Path(static.__file__).parent / "page"
NAMES = sorted(path.name for path in FOLDER.iterdir())


@in_loop
async def test_the_page_is_at_the_root_and_its_files_beside_it():
    async with http_gateway() as gateway:
        index = await gateway.call("GET", "/")
        assert index.status == 200 and index.body == (FOLDER / "index.html").read_bytes()
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        for name in NAMES:
            reply = await gateway.call("GET", f"/page/{name}")
            assert reply.status == 200 and reply.body == (FOLDER / name).read_bytes()
            assert reply.headers["content-type"].encode() == CONTENT_TYPES[name.rpartition(".")[2]]
        head = await gateway.call("HEAD", "/")
        assert (head.status, head.headers["content-length"]) == (200, str(len(index.body)))
        assert (await gateway.call("POST", "/", {})).status == 405
        for path in ("none.js", "", "../static.py", "%2e%2e/static.py", "..%2fstatic.py", "index.html/"):
            assert (await gateway.call("GET", f"/page/{path}")).error["message"]


@in_loop
async def test_every_file_is_sent_with_a_strict_policy():
    async with http_gateway() as gateway:
        for path in ["/", *(f"/page/{name}" for name in NAMES)]:
            headers = (await gateway.call("GET", path)).headers
            policy = {
                words[0]: words[1:] for part in headers["content-security-policy"].split(";") if (words := part.split())
            }
            assert policy["default-src"] == ["'self'"] and policy["frame-ancestors"] == ["'none'"]
            assert all("unsafe" not in source for sources in policy.values() for source in sources)
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


@in_loop
async def test_a_browser_keeps_a_file_and_asks_whether_it_is_still_the_same():
    async with http_gateway() as gateway:
        first = await gateway.call("GET", "/page/main.js")
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        for given in (etag, f"W/{etag}", f'"other", {etag}'):
            again = await gateway.call("GET", "/page/main.js", headers={"if-none-match": given})
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
        other = await gateway.call("GET", "/page/main.js", headers={"if-none-match": '"other"'})
        assert other.status == 200
        assert len({file.etag for file in page_files().values()}) == len(NAMES)


@in_loop
async def test_the_page_asks_for_the_key_and_sends_nothing_without_it():
    async with http_gateway(api_key_hashes=["0" * 64]) as gateway:
        for path in ("/", "/page/main.js"):
            reply = await gateway.call("GET", path, headers={"accept": "text/html"})
            assert reply.status == 401 and reply.headers["www-authenticate"].startswith("Basic")


def test_every_file_is_packaged_and_has_a_content_type():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in NAMES:
        assert any(fnmatch.fnmatch(f"page/{name}", pattern) for pattern in patterns["quartet.services.gateway.http"])
    assert sorted(page_files()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_refers_to_is_there_and_nothing_is_from_elsewhere(name):
    text = (FOLDER / name).read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    if name.endswith(".html"):
        found = re.findall(r'(?:src|href)="([^"#]+)"', text)
        assert found and all(path in ("docs", *(f"page/{other}" for other in NAMES)) for path in found)
        # What the policy would refuse.
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script>", text)
    if name.endswith(".js"):
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= set(NAMES)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    if name.endswith(".css"):
        assert "url(" not in text and "@import" not in text


def test_every_module_is_reached_from_the_page():
    reached, left = set(), re.findall(r'src="page/([^"]+)"', (FOLDER / "index.html").read_text())
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            if name.endswith(".js"):
                left += re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text())
    assert {name for name in NAMES if name.endswith(".js")} <= reached
