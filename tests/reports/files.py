"""Records and pictures to put into folders of results."""

import json
import struct
import zlib

ENVIRONMENT = {
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "platform": "Linux",
    "processor": "AMD EPYC",
    "cores": 2,
    "torch_threads": 1,
    "accelerator": None,
    "commit": "0123456789abcdef-dirty",
}


def png(width=40, height=20):
    """A red picture."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + b"\xff\0\0" * width for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def write_record(path, command, *, config=None, environment=ENVIRONMENT, results=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": command,
        "config": {} if config is None else config,
        "environment": environment,
        "results": {} if results is None else results,
    }
    path.write_text(json.dumps(facts), encoding="utf-8")
