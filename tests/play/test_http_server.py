"""The HTTP layer: what it refuses, what it hands on, and what it sends with every answer.

Requests go over a real socket, so that they may be anything that a hostile client sends.
"""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from importlib import resources

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")


from attndsl import cli
from attndsl.errors import ArgumentError
from attndsl.play import http_server as play_server
from attndsl.play.answers import answer
from attndsl.play.http_server import HOST, MOST_BYTES, listen, make_app, server_of
from attndsl.play.messages import Answer, TextProblem
from attndsl.play.request_guard import HEADERS, RequestGuard

TOKEN = "the-token-of-this-test"


class InProcess:
    """Answers without processes; 'hang' as a text waits until nobody waits for it."""

    def __init__(self):
        self.cancelled = threading.Event()

    async def start(self):
        pass

    async def stop(self):
        pass

    async def ask(self, asked):
        if asked.text == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return answer(asked).as_json()


@pytest.fixture(scope="module")
def answering():
    return InProcess()


@pytest.fixture(scope="module")
def port(answering):
    listening = listen(0)
    server = server_of(make_app(answering, RequestGuard(TOKEN)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def call(port):
    """``call(method, path, body, **headers)``: status, headers, body."""

    def request(method, path, body=None, **headers):
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {k: v for k, v in named.items() if v is not None})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.headers, content

    return request


@pytest.fixture
def ask(call):
    """The status and the answer to a request of the page."""

    def request(values, **headers):
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        own = {"Content_Type": "application/json", "X_Attndsl_Token": TOKEN, **headers}
        status, _, content = call("POST", "/answer", body, **own)
        return status, content

    return request


def test_the_page_brings_all_that_it_needs(call):
    """The smoke test of the page: nothing comes from elsewhere, and every part of it is there."""
    status, headers, page = call("GET", "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    text = page.decode()
    assert TOKEN in text
    assert "{{" not in text
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text)
    loaded = re.findall(r'(?:src|href)="(/[^"]*)"', text)
    assert set(loaded) == {"/icon.svg", "/play.css", "/main.js"}
    ids = set(re.findall(r'id="([^"]+)"', text))
    seen = set()
    while loaded:
        path = loaded.pop()
        status, headers, content = call("GET", path)
        assert status == 200, path
        source = content.decode()
        assert "https://" not in source
        assert set(re.findall(r"http://[^\"` ]+", source)) <= {"http://www.w3.org/2000/svg"}
        if path.endswith(".js"):
            assert headers["Content-Type"] == "text/javascript; charset=utf-8"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\beval\b|Function\(", source)
            ids_named = set(re.findall(r'\b(?:at|getElementById|note|settle)\("([^"]+)"', source))
            assert ids_named <= ids | {"q_len"}, path
            loaded += [f"/{n}" for n in re.findall(r'from "\./([^"]+)"', source) if n not in seen]
            seen.add(path[1:])
    assert seen == {"main.js", "asker.js", "editor.js", "settings.js"}
    listed = json.loads(call("GET", "/examples.json")[2])
    assert [name for name, _ in listed["groups"]] == ["Programs", "Functions of the prelude"]
    for label in re.findall(r'for="([^"]+)"|aria-labelledby="([^"]+)"', text):
        assert set(filter(None, label)) <= ids


def test_every_static_file_is_served(call):
    for file in resources.files("attndsl.play").joinpath("static").iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        assert call("GET", path)[0] == 200


def test_a_question_is_answered(ask, call):
    status, content = ask({"kind": "picture", "text": "q >= kv"})
    assert status == 200
    assert json.loads(content)["result"]["svg"].startswith("<svg")
    status, content = ask({"kind": "picture", "text": "q >= k"})
    assert status == 200
    assert json.loads(content)["problems"][0]["start"] == 5


def test_server_time_is_told(call):
    body = json.dumps({"kind": "picture", "text": "q >= kv"})
    headers = {"Content_Type": "application/json", "X_Attndsl_Token": TOKEN}
    _, found, _ = call("POST", "/answer", body, **headers)
    assert re.fullmatch(r"picture;dur=\d+\.\d", found["Server-Timing"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 200), ("GET", "/nothing", 404), ("GET", "/../server.py", 404),
     ("GET", "/index.html", 404), ("GET", "/answer", 405), ("POST", "/", 403),
     ("OPTIONS", "/answer", 403), ("DELETE", "/", 403), ("GET", "//evil.example/", 404)],
)  # fmt: skip
def test_headers_come_with_every_answer(call, method, path, status):
    found, headers, _ = call(method, path)
    assert found == status
    for name, value in HEADERS.items():
        assert headers.get_all(name) == [value]
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_scripts_come_from_the_server_alone():
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example",
                                  "localhost.evil.example", "[::1]", "", "127.0.0.1:x",
                                  "evil@127.0.0.1", "0.0.0.0"])  # fmt: skip
def test_other_hosts_are_refused(call, ask, host):
    assert call("GET", "/", Host=host)[0] == 403
    assert ask({"kind": "picture", "text": "q >= kv"}, Host=host)[0] == 403


def test_own_hosts_are_taken(call, port):
    for host in ("localhost", f"localhost:{port}", "127.0.0.1", "127.0.0.1:80"):
        assert call("GET", "/", Host=host)[0] == 200


def test_two_hosts_are_refused(port):
    raw = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
    assert b" 400 " in exchange(port, raw) or b" 403 " in exchange(port, raw)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1",
                                    "http://127.0.0.1:1", "http://localhost", ""])  # fmt: skip
def test_other_origins_are_refused(ask, origin):
    status, content = ask({"kind": "picture", "text": "q >= kv"}, Origin=origin)
    assert status == 403
    assert b"origin" in content


def test_the_own_origin_is_taken(ask, port):
    asked = {"kind": "picture", "text": "q >= kv"}
    assert ask(asked, Origin=f"http://127.0.0.1:{port}")[0] == 200
    named = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert ask(asked, **named)[0] == 200


def test_requests_of_other_sites_are_refused(call, ask):
    for site in ("cross-site", "same-site"):
        assert call("GET", "/main.js", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
        assert ask({"kind": "picture", "text": ""}, Sec_Fetch_Site=site)[0] == 403
    # A link on another site leads here.
    assert call("GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "\xe9" * 40])
def test_other_tokens_are_refused(ask, token):
    status, content = ask({"kind": "picture", "text": "q >= kv"}, X_Attndsl_Token=token)
    assert status == 403
    assert content == b"the page is of an earlier server: load it again\n"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded",
                                  "multipart/form-data; boundary=x"])  # fmt: skip
def test_forms_are_refused(ask, kind):
    assert ask({"kind": "picture", "text": "q >= kv"}, Content_Type=kind)[0] == 403


def test_tokens_differ_between_servers():
    assert RequestGuard().token != RequestGuard().token
    assert len(RequestGuard().token) >= 40


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe\x00", bytes(range(256)) * 100, b"[" * 100_000,
     b'{"a":' * 30_000, b"9" * 100_000, b'{"kind": "picture", "text": NaN}',
     b'{"kind": "picture", "text": "\\ud83d"}', b'"text"', b"null"],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_request_is_refused(ask, body):
    status, content = ask(body)
    assert status == 400
    assert json.loads(content)["problems"][0]["message"]


def test_long_requests_are_refused(ask, port):
    assert ask(b" " * MOST_BYTES)[0] == 400
    status, content = ask(b" " * (MOST_BYTES + 1))
    assert status == 413
    assert "longer" in json.loads(content)["problems"][0]["message"]
    # Without a length, in parts that never end.
    head = (
        f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Attndsl-Token: {TOKEN}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    part = b"10000\r\n" + b" " * 65536 + b"\r\n"
    assert b" 413 " in exchange(port, head + 20 * part)


def test_long_programs_are_refused(ask):
    status, content = ask({"kind": "picture", "text": "#" * 16385})
    assert status == 400
    assert "longer than 16384" in json.loads(content)["problems"][0]["message"]
    assert ask({"kind": "picture", "text": "\N{GRINNING FACE}" * 16384})[0] == 200


def exchange(port, raw):
    """What the server answers to bytes."""
    with socket.create_connection((HOST, port), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw)
        found = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while b"\r\n\r\n" not in found and (more := connection.recv(65536)):
                found += more
        return found


@pytest.mark.parametrize(
    "raw",
    [b"\x00\xff\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n"],
    ids=["binary", "huge header", "negative length"],
)  # fmt: skip
def test_what_is_no_http_does_no_harm(port, call, raw):
    assert b" 200 " not in exchange(port, raw)
    assert call("GET", "/")[0] == 200


def test_sockets_are_refused(port):
    raw = (
        b"GET /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert b" 101 " not in exchange(port, raw)


def test_who_goes_away_ends_the_work(port, answering):
    body = b'{"kind": "picture", "text": "hang"}'
    head = (
        f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Attndsl-Token: {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection((HOST, port), timeout=30) as connection:
        connection.sendall(head + body)
        time.sleep(0.3)
        assert not answering.cancelled.is_set()
    assert answering.cancelled.wait(20)


JSON = f"X-Attndsl-Token: {TOKEN}\r\nContent-Type: application/json\r\n".encode()
HEAD = b"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("raw", "count", "said"),
    [(b"", 80, b""), (HEAD, 80, b""), (HEAD + JSON + b"Content-Length: 9\r\n\r\n", 40, b" 408 ")],
    ids=["nothing", "half a head", "half a request"],
)
def test_who_sends_no_whole_request_keeps_no_place(monkeypatch, port, call, raw, count, said):
    monkeypatch.setattr(play_server, "REQUEST_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        several = [
            stack.enter_context(socket.create_connection((HOST, port), timeout=30))
            for _ in range(count)
        ]
        for each in several:
            each.sendall(raw)
        end = time.monotonic() + 20
        while call("GET", "/")[0] != 200:
            assert time.monotonic() < end
        assert said in several[0].recv(65536)
    assert call("GET", "/")[0] == 200


def test_a_connection_that_has_sent_a_request_waits_for_the_answer(monkeypatch, port, answering):
    monkeypatch.setattr(play_server, "REQUEST_SECONDS", 0.2)
    answering.cancelled.clear()
    body = b'{"kind": "picture", "text": "hang"}'
    with socket.create_connection((HOST, port), timeout=30) as connection:
        connection.sendall(HEAD + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert not answering.cancelled.wait(1.0)
    assert answering.cancelled.wait(20)


def test_ports():
    with listen(0) as first:
        assert first.getsockname()[0] == HOST
        port = first.getsockname()[1]
        with pytest.raises(ArgumentError, match=f"cannot listen on port {port}"):
            listen(port)
        # None is any: the usual one, or another where that is taken.
        with listen(None) as second, listen(None) as third:
            assert second.getsockname()[1] != third.getsockname()[1]


@pytest.fixture
def command(monkeypatch, capsys):
    """``command(*arguments)``: exit code, stdout, stderr, where nothing is served."""

    def call(*arguments):
        monkeypatch.setattr("attndsl.play.http_server.run", lambda listening: listening.close())
        monkeypatch.setattr("sys.argv", ["attndsl", "play", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return code or 0, *capsys.readouterr()

    return call


def test_command_prints_the_address(command, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    code, out, _ = command("--port", 0, "--no-browser")
    assert code == 0
    assert re.match(r"attndsl play: http://127\.0\.0\.1:\d+/\n", out)
    assert opened == []
    (tmp_path / "a.attn").write_text("mask = q >= kv & 1 == 0\n")
    code, out, _ = command(tmp_path / "a.attn", "--port", 0)
    assert code == 0
    assert "/#program=mask%20%3D%20q%20%3E%3D%20kv%20%26%201%20%3D%3D%200%0A\n" in out
    assert opened == [out.split("\n")[0].removeprefix("attndsl play: ")]


def test_command_takes_programs_of_configurations(command, tmp_path):
    (tmp_path / "near.attn").write_text("def near(x, y) = abs(x - y) < w\n")
    (tmp_path / "m.yaml").write_text(
        'a:\n  program: "param w: int; mask = q - kv < w"\n  params: {w: 4}\n'
        'b:\n  program: "mask = q - kv < w"\n  params: {w: 8}\n'
        'c:\n  program: "param w: int = none; mask = q - kv < w"\n  params: {w: null}\n'
    )
    code, out, _ = command(tmp_path / "m.yaml", "--name", "a", "--port", 0, "--no-browser")
    assert code == 0
    assert out.split("\n")[0].endswith("kv%20%3C%20w&param.w=4")
    _, out, _ = command(tmp_path / "m.yaml", "--name", "b", "--port", 0, "--no-browser")
    assert "#program=param%20w%3A%20int%20%3D%208%0Amask" in out
    code, out, _ = command(tmp_path / "m.yaml", "--name", "c", "--port", 0, "--no-browser")
    assert code == 0
    assert out.split("\n")[0].endswith("kv%20%3C%20w&param.w=none")


def test_command_refuses_a_busy_port(command):
    with listen(0) as busy:
        code, _, err = command("--port", busy.getsockname()[1], "--no-browser")
    assert code == 2
    assert "hint: give another --port" in err


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_command_says_what_to_install(monkeypatch, capsys, module):
    for name in [n for n in sys.modules if n.startswith((module, "attndsl.play.http_server"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("sys.argv", ["attndsl", "play", "--no-browser"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        f"the page needs starlette and uvicorn, and there is no module '{module}'\n"
        "  hint: pip install 'attndsl[play]'\n"
    )


def test_the_server_does_not_import_torch():
    code = (
        "import sys, attndsl.play.http_server\n"
        "print([n for n in ('torch', 'sympy', 'islpy', 'triton', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_problems_are_json():
    assert Answer((TextProblem("m"),)).as_json()["problems"][0]["hint"] is None
