"""The page at `/`: files beside this module, served from memory. It asks the same API as every client.

Nothing on it is secret and nothing comes from elsewhere: no script, font or image of another host, no inline
code, and a content security policy that holds it to that.
"""

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_playground(app: FastAPI) -> None:
    """Give an application the page at `/` and its files under `/page/`."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    etags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}

    def answer(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "Not Found")
        headers = _HEADERS | {"etag": etags[name]}
        if request.headers.get("if-none-match") == etags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], headers=headers, media_type=_MEDIA_TYPES[Path(name).suffix])

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        return answer(request, name)
