"""moto's server, one request at a time: between its look for a key and its write of that key lies
no lock, so of two writers with `If-None-Match: *` both could win."""

import sys
import threading

from moto import server

run_threaded = server.run_simple
one_at_a_time = threading.Lock()


def run(host, port, application, **options):
    def locked(environ, start_response):
        with one_at_a_time:
            return application(environ, start_response)

    run_threaded(host, port, locked, **options)


server.run_simple = run
server.main(["-H", "127.0.0.1", "-p", sys.argv[1]])
