"""Programs of Python in processes of their own, which begin with the imports of others done.

To import torch takes two of the three seconds of a program that uses attndsl a little. A server
imports it once for each process of the tests, with what else comes from other projects, and forks
for each program. attndsl, its tests and Triton are not imported there: Triton and attndsl read the
environment as they are imported, and programs have environments of their own.

Not for what a test says of imports, of Python's options or of how Python ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import io

COMMAND = "from attndsl.cli import main; main()"
"""What the command ``attndsl`` runs."""
_IMPORTED = ("torch", "numpy", "sympy", "islpy", "lark", "yaml", "platformdirs", "typer", "rich")
_LIMIT = 300
"""Seconds of a program, if it is given none."""
_STUB = """\
#!{python} -SPE
import array, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = dict(code={code!r}, arguments=sys.argv, cwd=os.getcwd(), env=dict(os.environ))
request["limit"] = {limit}
fds = array.array("i", [0, 1, 2])
server.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
server.sendall(json.dumps(request).encode() + b"\\n")
status = int(server.makefile().readline())
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def compiling() -> dict[str, str]:
    """The environment of a program that compiles kernels, and may import ``support``."""
    found = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return found | {"PYTHONPATH": str(Path(__file__).parents[1])}


def run_python(
    code: str, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None,
    given: str = "", limit: int = _LIMIT,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """What ``python -P -c CODE ARGUMENTS`` does, sooner.

    Args:
        code: The program.
        arguments: ``sys.argv[1:]``.
        env: Its environment; this process's if not given.
        cwd: Its folder; this process's if not given.
        given: Its standard input.
        limit: Seconds, after which it ends by the signal ``SIGALRM``.
    """
    request = {
        "code": code, "arguments": ["-c", *map(str, arguments)], "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env), "limit": limit,
    }  # fmt: skip
    with (
        tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr, socket.socket(socket.AF_UNIX) as server,
    ):  # fmt: skip
        stdin.write(given)
        stdin.seek(0)
        server.connect(str(_server()))
        socket.send_fds(server, [b"x"], [file.fileno() for file in (stdin, stdout, stderr)])
        server.sendall(json.dumps(request).encode() + b"\n")
        status = int(server.makefile().readline())
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(code, status, stdout.read(), stderr.read())


def run_script(path: Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``python PATH ARGUMENTS`` does, sooner; options as of :func:`run_python`."""
    script, folder = str(path), str(Path(path).parent)
    code = (
        f"import runpy, sys; sys.path.insert(0, {folder!r})\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    return run_python(code, *arguments, **options)


def path_with_command() -> str:
    """A ``PATH`` on which ``attndsl`` is the command, begun by the server."""
    return f"{_folder_with_command()}{os.pathsep}{Path(sys.executable).parent}" + (
        os.pathsep + os.environ["PATH"]
    )


@functools.cache
def _folder_with_command() -> Path:
    path = _server().with_name("attndsl")
    path.write_text(
        _STUB.format(python=sys.executable, path=str(_server()), code=COMMAND, limit=_LIMIT)
    )
    path.chmod(0o700)
    return path.parent


@functools.cache
def _server() -> Path:
    """Where the server of this process listens."""
    folder = tempfile.TemporaryDirectory(prefix="attndsl-fork-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, "socket")
    process = subprocess.Popen([sys.executable, "-P", __file__, path], stdin=subprocess.PIPE)
    atexit.register(process.wait)
    assert process.stdin is not None
    atexit.register(process.stdin.close)  # Before it is waited for.
    while not path.exists():
        assert process.poll() is None, "the server of tests ended"
        time.sleep(0.01)
    return path


def serve(path: str) -> None:
    """Fork for each program that comes to the socket at ``path``, until standard input ends."""
    for name in _IMPORTED:
        __import__(name)
    gc.freeze()  # No program has to look for garbage among these.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(16)
    os.rename(f"{path}.new", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for those that wait.
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(client)
        client.close()


def _attend(client: socket.socket) -> None:
    """Run a client's program in another process, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, fds, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile().readline())
    process = os.fork()
    if process == 0:
        client.close()
        _become(request, fds)
    for each in fds:
        os.close(each)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    client.sendall(f"{status}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Be the process of a program."""
    status = 1
    try:
        signal.alarm(request["limit"])
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin = _text(0, "r")
        sys.stdout = _text(1, "w")
        sys.stderr = _text(2, "w", 1, "backslashreplace")
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv[:] = request["arguments"]
        sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
        status = _exit_status(request["code"])
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _text(fd: int, mode: str, buffering: int = -1, errors: str = "strict") -> io.TextIOWrapper:
    return open(fd, mode, buffering, "utf-8", errors, closefd=False)


def _exit_status(code: str) -> int:
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "<string>", "exec"), names)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
