"""A client of ``attndsl lsp`` over its standard streams, and files that it has open."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path


class Editor:
    """Speaks JSON-RPC with a server of its own, as an editor does."""

    def __init__(self, capabilities=None, code=None):
        command = ["-P", "-m", "attndsl", "lsp"] if code is None else ["-P", "-c", code]
        self.server = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self.messages = queue.Queue()
        self.seen = []
        """Notifications that nobody has asked for yet."""
        self.versions = {}
        self.number = 0
        threading.Thread(target=self._read_all, daemon=True).start()
        hello = {"processId": os.getpid(), "rootUri": None, "capabilities": capabilities or {}}
        self.abilities = self.ask("initialize", hello)["capabilities"]
        self.tell("initialized", {})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.server.poll() is None:
            self.server.kill()
        self.server.wait(20)
        for stream in (self.server.stdin, self.server.stdout, self.server.stderr):
            stream.close()

    def end(self):
        """End the server as editors do; what it returned and said to the terminal."""
        self.ask("shutdown", None)
        self.tell("exit", None)
        self.server.stdin.close()
        code = self.server.wait(20)
        return code, self.server.stderr.read().decode()

    def _read_all(self):
        stream = self.server.stdout
        while True:
            size = 0
            while (line := stream.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    size = int(value)
            if not size:
                return
            self.messages.put(json.loads(stream.read(size)))

    def tell(self, method, params, number=None):
        """Send a notification, or the request ``number``."""
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        if number is not None:
            message["id"] = number
        data = json.dumps(message).encode()
        self.server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self.server.stdin.flush()

    def ask(self, method, params, timeout=60):
        """The result of a request."""
        self.number += 1
        self.tell(method, params, self.number)
        while True:
            message = self.messages.get(timeout=timeout)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.seen.append(message)

    def open(self, uri, text, language="attn"):
        """Open a file; its diagnostics."""
        self.versions[uri] = 1
        document = {"uri": uri, "languageId": language, "version": 1, "text": text}
        self.tell("textDocument/didOpen", {"textDocument": document})
        return self.diagnostics(uri)

    def change(self, uri, text):
        """Give a file another text; its diagnostics."""
        self.versions[uri] += 1
        place = {"uri": uri, "version": self.versions[uri]}
        change = {"textDocument": place, "contentChanges": [{"text": text}]}
        self.tell("textDocument/didChange", change)
        return self.diagnostics(uri)

    def diagnostics(self, uri, timeout=60):
        """The diagnostics of the newest version of a file, once they come."""
        while True:
            message = self.seen.pop(0) if self.seen else self.messages.get(timeout=timeout)
            if message.get("method") != "textDocument/publishDiagnostics":
                continue
            found = message["params"]
            if found["uri"] == uri and found.get("version") == self.versions[uri]:
                return found["diagnostics"]

    def at(self, method, uri, line, character, **more):
        """The result of ``textDocument/METHOD`` at a place."""
        place = {"line": line, "character": character}
        params = {"textDocument": {"uri": uri}, "position": place, **more}
        return self.ask(f"textDocument/{method}", params)


def covered(text, place):
    """The characters of ``text`` at a range; lines of ASCII only."""
    lines = text.split("\n")
    start, end = place["start"], place["end"]
    if start["line"] == end["line"]:
        return lines[start["line"]][start["character"] : end["character"]]
    return "\n".join(
        [
            lines[start["line"]][start["character"] :],
            *lines[start["line"] + 1 : end["line"]],
            lines[end["line"]][: end["character"]],
        ]
    )


def uri_of(path):
    """The address of a file."""
    return Path(path).absolute().as_uri()
