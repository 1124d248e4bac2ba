"""A small S3 store whose answers a program decides: it knows objects, listings, ranges, uploads in pieces and
`If-None-Match`."""

import hashlib
import http.server
import re
import threading
import urllib.parse
import xml.sax.saxutils


class Store:
    """Objects by `bucket/key`. `asked` has method, path and names of headers. `before` may answer a request with a status instead of the store."""

    def __init__(self, preconditions=True):
        self.objects, self.uploads, self.asked = {}, {}, []
        self.preconditions = preconditions
        self.before = lambda method, path, headers: None
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"store": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        # Clients are killed in mid-request.
        self.server.handle_error = lambda *_: None
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def env(self):
        """The variables with which a command reaches it."""
        return {"TROMMEL_S3__ENDPOINT": f"http://127.0.0.1:{self.server.server_port}", "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}

    def upload(self, folder, prefix):
        """Puts the files of a folder under a prefix such as `photos/a/`."""
        for path in folder.iterdir():
            self.objects[prefix + path.name] = path.read_bytes()

    def times(self, method, part=""):
        """How often something was requested by this method."""
        return sum(asked == method and part in path for asked, path, _ in self.asked)


def etag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store = None

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def handle_one(self):
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.unquote(url.path).lstrip("/")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self.read_body()
        store = self.store
        is_list = self.command == "GET" and "/" not in name.strip("/")
        store.asked.append(("LIST" if is_list else self.command, name, {key.lower() for key in self.headers}))
        refused = store.before("LIST" if is_list else self.command, name, self.headers)
        if refused:
            return self.refuse(*refused)
        if is_list:
            return self.list(name.strip("/"), query)
        return getattr(self, self.command.lower())(name, query, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

    def read_body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in (self.headers.get("Content-Encoding") or ""):
            return body
        content, rest = b"", body
        while rest:
            size, rest = rest.split(b"\r\n", 1)
            length = int(size.split(b";")[0], 16)
            if length == 0:
                break
            content, rest = content + rest[:length], rest[length + 2:]
        return content

    def get(self, name, _query, _body):
        content = self.store.objects.get(name)
        if content is None:
            return self.refuse(404, "NoSuchKey")
        if self.headers.get("If-Match") not in (None, etag(content)):
            return self.refuse(412, "PreconditionFailed")
        head = {"ETag": etag(content), "Last_Modified": "Mon, 02 Nov 2026 00:00:00 GMT", "Accept_Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if not wanted:
            return self.answer(200, content, **head)
        first, last = wanted.groups()
        first, last = (int(first), int(last or len(content) - 1)) if first else (len(content) - int(last), len(content) - 1)
        piece = content[first:last + 1]
        if not piece:
            return self.refuse(416, "InvalidRange")
        return self.answer(206, piece, Content_Range=f"bytes {first}-{first + len(piece) - 1}/{len(content)}", **head)

    def head(self, name, query, body):
        return self.get(name, query, body)

    def put(self, name, query, body):
        store = self.store
        if "uploadId" in query:
            store.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return self.answer(200, ETag=etag(body))
        with store.lock:
            if store.preconditions and self.headers.get("If-None-Match") and name in store.objects:
                return self.refuse(412, "PreconditionFailed")
            store.objects[name] = body
        return self.answer(200, ETag=etag(body))

    def delete(self, name, query, _body):
        if "uploadId" in query:
            self.store.uploads.pop(query["uploadId"], None)
        else:
            self.store.objects.pop(name, None)
        return self.answer(204)

    def post(self, name, query, body):
        if "uploads" in query:
            upload = f"upload-{len(self.store.asked)}"
            self.store.uploads[upload] = {}
            return self.answer(200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                                    "</InitiateMultipartUploadResult>".encode())
        if "uploadId" in query:
            pieces = self.store.uploads.pop(query["uploadId"], None)
            if pieces is None:
                return self.refuse(404, "NoSuchUpload")
            whole = b"".join(pieces[number] for number in sorted(pieces))
            if self.store.preconditions and self.headers.get("If-None-Match") and name in self.store.objects:
                return self.refuse(412, "PreconditionFailed")
            self.store.objects[name] = whole
            return self.answer(200, f"<CompleteMultipartUploadResult><ETag>{xml.sax.saxutils.escape(etag(whole))}"
                                    "</ETag></CompleteMultipartUploadResult>".encode())
        for key in re.findall(rb"<Key>(.*?)</Key>", body):
            key = xml.sax.saxutils.unescape(key.decode())
            self.store.objects.pop(f"{name.strip('/')}/{key}", None)
        return self.answer(200, b"<DeleteResult/>")

    def list(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        most = int(query.get("max-keys", 1000))
        found, groups = [], set()
        for name in sorted(self.store.objects):
            key = name.removeprefix(f"{bucket}/")
            if key == name or not key.startswith(prefix) or key <= after:
                continue
            rest = key[len(prefix):]
            if delimiter and delimiter in rest:
                groups.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                found.append(key)
        more, found = len(found) > most, found[:most]
        text = xml.sax.saxutils.escape
        entries = [f"<Contents><Key>{text(key)}</Key><Size>{len(self.store.objects[f'{bucket}/{key}'])}</Size>"
                   f"<ETag>{text(etag(self.store.objects[f'{bucket}/{key}']))}</ETag>"
                   "<LastModified>2026-11-02T00:00:00.000Z</LastModified></Contents>" for key in found]
        entries += [f"<CommonPrefixes><Prefix>{text(group)}</Prefix></CommonPrefixes>" for group in sorted(groups)]
        token = f"<NextContinuationToken>{text(found[-1])}</NextContinuationToken>" if more else ""
        self.answer(200, (f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>{str(more).lower()}</IsTruncated>"
                          f"{token}{''.join(entries)}</ListBucketResult>").encode(), Content_Type="application/xml")
