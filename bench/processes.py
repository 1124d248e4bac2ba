"""What benchmarks of servers share: free ports, waiting, and what a process reports."""

import os
import socket
import sys
import time
import urllib.error
import urllib.request


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(what, look, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    sys.exit(f"{os.path.basename(sys.argv[0])}: {what}: not within {seconds} s")


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


def connects(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return None
    return True


def stop(processes):
    """Kills them, the last one first."""
    for process in reversed(processes):
        process.kill()
        process.wait()
