"""Stores of obstore, credentials that are asked for, progress. With a server where one runs:
`bash tests/servers/run moto -- python -m pytest python/tests/test_sources.py`."""

import datetime
import os
import pickle
import uuid

import numpy as np
import obstore
import pytest
import tensorcask

STATE = {"w": np.arange(300_000, dtype=np.float32), "lr": 0.5}
on_s3 = pytest.mark.skipif("AWS_ENDPOINT" not in os.environ, reason="needs an S3 server: tests/servers/run")


def same(state):
    return np.array_equal(state["w"], STATE["w"]) and state["lr"] == 0.5


class Provider:
    """Credentials that are wrong until they are renewed."""

    def __init__(self, seconds, first=None):
        self.seconds, self.first, self.asked = seconds, first, 0

    def __call__(self):
        self.asked += 1
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.seconds)
        key = self.first if self.first and self.asked == 1 else os.environ.get("AWS_SECRET_ACCESS_KEY", "secret")
        return {"access_key_id": os.environ.get("AWS_ACCESS_KEY_ID", "key"), "secret_access_key": key, "token": None, "expires_at": expires}


def s3(**options):
    bucket = os.environ["TENSORCASK_TEST_STORE"].removeprefix("s3://")
    client = {"allow_http": True, "timeout": "60s"}
    options = {"endpoint": os.environ["AWS_ENDPOINT"], "region": "us-east-1", "client_options": client, **options}
    return obstore.store.S3Store(bucket, prefix=f"python/{uuid.uuid4().hex}", **options)


def test_a_local_store_of_obstore(tmp_path):
    local = obstore.store.LocalStore(str(tmp_path / "run"), mkdir=True)
    tensorcask.save(STATE, local, step=1)
    assert tensorcask.save(STATE, local, step=2).kind == "delta"
    assert same(tensorcask.load(local)) and same(tensorcask.Store(local).load(step=1))
    assert same(tensorcask.load(tmp_path / "run"))
    with pytest.raises(tensorcask.UnsupportedError, match="MemoryStore"):
        tensorcask.Store(obstore.store.MemoryStore())


@on_s3
def test_an_s3_store_of_obstore_with_its_settings(monkeypatch):
    keys = {"access_key_id": os.environ["AWS_ACCESS_KEY_ID"], "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
    stores = [s3(**keys), s3(credential_provider=Provider(3600))]
    # Nothing comes from the environment.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for found in stores:
        tensorcask.save(STATE, found, step=1)
        assert same(tensorcask.load(found)) and tensorcask.Store(found).verify().is_clean
        assert len(obstore.list(found, prefix="log/").collect()) == 2


@on_s3
def test_credentials_are_asked_for_again():
    found = s3()
    url = f"{os.environ['TENSORCASK_TEST_STORE']}/{found.prefix}"
    lasting, short = Provider(3600), Provider(1.5)
    store = tensorcask.Store(url, credential_provider=lasting)
    store.save(STATE, step=1)
    assert same(store.load()) and same(pickle.loads(pickle.dumps(store)).load()) and lasting.asked == 1
    store = tensorcask.Store(url, credential_provider=short)
    store.save(STATE, step=2)
    # Requests until the first credentials have expired; the bound only ends a test that would hang.
    for _ in range(100_000):
        if short.asked > 1:
            break
        assert same(store.load(step=2))
    assert short.asked > 1 and same(store.load(step=2))


def test_providers_that_cannot_be_used():
    with pytest.raises(tensorcask.UnsupportedError, match="gs://"):
        tensorcask.Store("gs://bucket/run", credential_provider=Provider(10))
    with pytest.raises(tensorcask.InvalidArgumentError, match="expected one of access_key_id"):
        tensorcask.Store("s3://bucket/run", credential_provider=lambda: {"user": "me"})
    with pytest.raises(TypeError, match="not a mapping"):
        tensorcask.Store("s3://bucket/run", credential_provider=lambda: "key")

    async def later():
        return {}

    with pytest.raises(TypeError, match="asynchronous"):
        tensorcask.Store("s3://bucket/run", credential_provider=later)


def test_a_boto3_session():
    import boto3

    session = boto3.Session(aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1")
    assert tensorcask.Store("s3://bucket/run", credential_provider=session).url.startswith("s3://bucket")


def test_progress_is_told(url, capsys):
    told = []
    tensorcask.save(STATE, url, step=1, progress=lambda read, written: told.append((read, written)))
    assert told[-1][1] > 100_000 and told == sorted(told)
    told.clear()
    assert same(tensorcask.load(url, progress=lambda read, written: told.append((read, written))))
    assert told[-1][0] > 100_000
    assert tensorcask.Store(url).verify(progress=True).is_clean
    assert "verify" in capsys.readouterr().err

    def fails(read, written):
        raise RuntimeError("a bar that breaks")

    assert same(tensorcask.load(url, progress=fails))
