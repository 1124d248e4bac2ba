"""moto's server, one request at a time: between its look for a key and its write of that key lies
no lock, so of two writers with `If-None-Match: *` both could win.

It stands for Google Cloud Storage too, whose XML interface is that of S3 but for generations. Below
`/azure/` is as much of Azure Blob Storage as the tests ask for."""

import itertools
import re
import sys
import threading
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from moto import server

PAGE = 3
MODIFIED = "Mon, 02 Nov 2026 08:00:00 GMT"
# What stands for a token of Google's; signatures are not checked.
SIGNED = "AWS4-HMAC-SHA256 Credential=any/20261102/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=any"

run_threaded = server.run_simple
one_at_a_time = threading.Lock()
numbers = itertools.count(1)
generations = {}
blobs = {}


def google(application, environ, start_response):
    method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer "):
        environ["HTTP_AUTHORIZATION"] = SIGNED
    wanted = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
    if wanted not in (None, str(generations.get(path, 0))):
        start_response("412 Precondition Failed", [("Content-Length", "0")])
        return [b""]

    def start(status, headers, *rest):
        if status.startswith("2") and method == "PUT":
            generations[path] = next(numbers)
        elif status.startswith("2") and method == "DELETE":
            generations.pop(path, None)
        generation = ("x-goog-generation", str(generations.get(path, 0)))
        return start_response(status, [*headers, generation], *rest)

    return application(environ, start)


def azure(environ, start_response):
    method = environ["REQUEST_METHOD"]
    path = environ["PATH_INFO"].encode("latin-1").decode().removeprefix("/azure/")
    query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}

    def answer(status, body=b"", **headers):
        headers = {"Content-Length": str(len(body)), "Last-Modified": MODIFIED, **headers}
        start_response(status, [(name.replace("_", "-"), value) for name, value in headers.items()])
        return [b"" if method == "HEAD" else body]

    if query.get("comp") == "list":
        return answer("200 OK", listed(path, query).encode())
    if query.get("comp") == "batch":
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode()
        answers = "".join(map(removed, re.findall(r"^DELETE /?(?:azure/)?(\S+)", body, re.MULTILINE)))
        kind = "multipart/mixed; boundary=batch"
        return answer("202 Accepted", f"{answers}--batch--\r\n".encode(), Content_Type=kind)
    etag, content = blobs.get(path, (None, b""))
    if environ.get("HTTP_IF_MATCH") not in (None, etag):
        return answer("412 Precondition Failed")
    if method == "PUT":
        if etag and environ.get("HTTP_IF_NONE_MATCH") == "*":
            return answer("409 Conflict")
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        blobs[path] = (f'"0x{next(numbers):X}"', body)
        return answer("201 Created", ETag=blobs[path][0])
    if etag is None:
        return answer("404 Not Found")
    if "HTTP_RANGE" not in environ:
        return answer("200 OK", content, ETag=etag)
    first, last = map(int, environ["HTTP_RANGE"].removeprefix("bytes=").split("-"))
    part = content[first : last + 1]
    if not part:
        return answer("416 Range Not Satisfiable")
    ranged = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
    return answer("206 Partial Content", part, ETag=etag, Content_Range=ranged)


def removed(path):
    """Removes one blob of a batch, and gives its part of the answer. Clients remove one at a time here."""
    status = "202 Accepted" if blobs.pop(unquote(path), None) else "404 Not Found"
    head = "--batch\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\n"
    return f"{head}HTTP/1.1 {status}\r\nx-ms-version: any\r\n\r\n\r\n"


def listed(container, query):
    """A page of a container, in the order of the keys' bytes."""
    below = f"{container}/"
    prefix, start = query.get("prefix", ""), query.get("marker", query.get("startFrom", ""))
    keys = sorted(path.removeprefix(below) for path in blobs if path.startswith(below))
    keys = [key for key in keys if key.startswith(prefix) and key >= start]
    found = "".join(
        f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified>"
        f"<Etag>{blobs[below + key][0].strip(chr(34))}</Etag><Content-Type>x/y</Content-Type>"
        f"<Content-Length>{len(blobs[below + key][1])}</Content-Length></Properties></Blob>"
        for key in keys[:PAGE]
    )
    marker = escape(keys[PAGE]) if len(keys) > PAGE else ""
    return f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"


def run(host, port, application, **options):
    def locked(environ, start_response):
        with one_at_a_time:
            if environ["PATH_INFO"].startswith("/azure/"):
                return azure(environ, start_response)
            return google(application, environ, start_response)

    run_threaded(host, port, locked, **options)


server.run_simple = run
server.main(["-H", "127.0.0.1", "-p", sys.argv[1]])
