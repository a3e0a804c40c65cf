"""A mirror of the Hugging Face hub with one dataset, on loopback."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40


@contextlib.contextmanager
def serve_dataset(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the dataset's files, by their paths in it. Yields the address, for HF_ENDPOINT."""
    api, resolved = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"
    tags = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}

    def list_folder(folder: str) -> list[dict[str, object]]:
        found = [p for p in files if str(Path(p).parent) == folder]
        below = {str(Path(p).parent) for p in files if folder == "."} - {"."}
        return [
            *({"type": "file", "path": p, "oid": tags[p], "size": len(files[p])} for p in found),
            *({"type": "directory", "path": p, "oid": COMMIT, "size": 0} for p in sorted(below)),
        ]

    class Mirror(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            revision = f"{api}/revision/"
            if path == api or path.startswith(revision):
                described = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": p} for p in files]}
                self.send(200, json.dumps({"_id": "1", "private": False, "tags": [], **described}).encode())
            elif path.startswith(f"{api}/tree/"):
                folder = path.removeprefix(f"{api}/tree/").partition("/")[2] or "."
                self.send(200, json.dumps(list_folder(folder)).encode())
            elif path.startswith(resolved) and (file := path.removeprefix(resolved).partition("/")[2]) in files:
                self.send(200, files[file], ETag=f'"{tags[file]}"', X_Repo_Commit=COMMIT)
            else:
                self.send(404, X_Error_Code="EntryNotFound")

        do_GET = do_HEAD = do_POST = answer

        def send(self, code: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(120)
