"""Starts object-store servers on loopback, runs a command against each in turn, and stops them by process id."""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time

VENV = pathlib.Path(__file__).resolve().parents[2] / ".cache/venv/bin"
CACHE = pathlib.Path(".cache")
BUCKET = "tensorcask-test"
S3_KEYS = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "SECRET1"}
# The public key of the emulator account, the same in every installation.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
TESTS = ["cargo", "test", "--workspace", "--test", "it", "object_stores::"]
READY_SECONDS = 90
_given_ports = set()


def free_port():
    """A new port that is free, and whose neighbour 10,000 above is free too: SeaweedFS takes both.

    Both are below the ports that Linux gives to outgoing connections.
    """
    for _ in range(200):
        port = random.randint(20000, 22700)
        if port in _given_ports:
            continue
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + 10000):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", number))
                _given_ports.add(port)
                return port
            except OSError:
                continue
    raise SystemExit("no free port")


def s3_environment(port, address="127.0.0.1"):
    return {
        "TENSORCASK_TEST_STORE": f"s3://{BUCKET}",
        "AWS_ENDPOINT": f"http://{address}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        **S3_KEYS,
    }


def make_bucket(environment):
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT"],
        region_name="us-east-1",
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        config=Config(connect_timeout=2, read_timeout=10, retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    try:
        client.create_bucket(Bucket=BUCKET)
    except (client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
        pass
    client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")


def moto(folder):
    port = free_port()
    environment = s3_environment(port)
    command = [sys.executable, str(pathlib.Path(__file__).with_name("moto_server.py")), str(port)]
    return command, environment, lambda: make_bucket(environment)


def seaweedfs(folder, address="127.0.0.1"):
    s3, master, volume, filer = free_port(), free_port(), free_port(), free_port()
    environment = s3_environment(s3, address)
    config = folder / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": S3_KEYS["AWS_ACCESS_KEY_ID"], "secretKey": S3_KEYS["AWS_SECRET_ACCESS_KEY"]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    (folder / "logs").mkdir()
    command = [str(VENV / "weed"), f"-logdir={folder / 'logs'}", "server", f"-dir={folder / 'data'}"]
    command += [f"-ip={address}", f"-ip.bind={address}", f"-master.port={master}", "-master.telemetry=false"]
    # Servers of other protocols, on fixed ports.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=0", f"-volume.port={volume}"]
    command += ["-filer=true", f"-filer.port={filer}", "-s3=true", f"-s3.port={s3}", f"-s3.config={config}"]
    return command, {**environment, "TENSORCASK_TEST_FILER": f"{address}:{filer}"}, lambda: make_bucket(environment)


def azurite(folder):
    port = free_port()
    tool = CACHE / "node/node_modules/.bin/azurite-blob"
    if not tool.exists():
        (CACHE / "node").mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", "azurite@3.35.0"], cwd=CACHE / "node", check=True)
    url = f"http://127.0.0.1:{port}"
    environment = {
        "TENSORCASK_TEST_STORE": f"az://{BUCKET}",
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": url,
    }

    def ready():
        from azure.storage.blob import BlobServiceClient

        account = {"account_name": "devstoreaccount1", "account_key": AZURITE_KEY}
        BlobServiceClient(f"{url}/devstoreaccount1", credential=account, retry_total=0).create_container(BUCKET)

    command = [str(tool.resolve()), "--location", str(folder), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    return command + ["--skipApiVersionCheck", "--disableTelemetry"], environment, ready


def rclone(folder):
    """Answers 200 to a conditional put and overwrites: the probe must refuse it."""
    port = free_port()
    environment = s3_environment(port)
    environment["TENSORCASK_TEST_UNSAFE_STORE"] = environment.pop("TENSORCASK_TEST_STORE")
    keys = f"{S3_KEYS['AWS_ACCESS_KEY_ID']},{S3_KEYS['AWS_SECRET_ACCESS_KEY']}"
    (folder / BUCKET).mkdir()
    command = [str(VENV / "rclone"), "serve", "s3", "--auth-key", keys, "--addr", f"127.0.0.1:{port}", str(folder)]
    return command, environment, lambda: make_bucket(environment)


SERVERS = {"moto": moto, "seaweedfs": seaweedfs, "azurite": azurite, "rclone": rclone}


def run(name, command):
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder, open(CACHE / f"{name}.log", "wb") as log:
        server, environment, ready = SERVERS[name](pathlib.Path(folder))
        process = subprocess.Popen(server, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while True:
                try:
                    ready()
                    break
                except Exception as error:
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"{name} did not become ready, see .cache/{name}.log: {error}")
                    time.sleep(0.3)
            return subprocess.run(command, env={**os.environ, **environment}).returncode
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main():
    arguments = sys.argv[1:]
    command = TESTS
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    unknown = [name for name in arguments if name not in SERVERS]
    if unknown:
        sys.exit(f"unknown server {unknown[0]}; known: {', '.join(SERVERS)}")
    for name in arguments or SERVERS:
        code = run(name, command)
        if code != 0:
            sys.exit(f"the tests against {name} failed")


if __name__ == "__main__":
    main()
