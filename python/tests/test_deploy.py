"""The files of `deploy/`: container, Kubernetes manifest and dashboard, beside an agent that really runs."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorcask
import yaml

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the engine needs Linux")

DEPLOY = Path(__file__).parents[2] / "deploy"
GUIDE = Path(__file__).parents[2] / "docs" / "src" / "guides" / "operate.md"
COMMAND = [sys.executable, "-m", "tensorcask"]
BYTES = {"Mi": 2**20, "Gi": 2**30}
# A host alone has no samples of these.
OF_MANY_HOSTS = ("replica_", "replicated_step", "without_store", "leader_term", "leads")


def instructions(name):
    """The values of an instruction of the Containerfile's last stage."""
    stage = re.split(r"^FROM ", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE)[-1]
    return re.findall(rf"^{name} (.*)$", stage, re.MULTILINE)


@pytest.fixture(scope="module")
def pod():
    [job] = yaml.safe_load_all((DEPLOY / "kubernetes" / "sidecar.yaml").read_text())
    assert job["kind"] == "Job"
    return job["spec"]["template"]


@pytest.fixture(scope="module")
def containers(pod):
    spec = pod["spec"]
    return {container["name"]: container for container in spec["initContainers"] + spec["containers"]}


@pytest.fixture
def agent(host_memory):
    """An agent, started by the command line of the container; the first line of its log says that it listens."""
    [entry], [words] = map(json.loads, instructions("ENTRYPOINT")), map(json.loads, instructions("CMD"))
    assert entry == ["tensorcask"]
    with subprocess.Popen([*COMMAND, *words]) as agent:
        # Answers once the socket listens.
        while probe(["tensorcask", "agent", "status"]) != 0:
            assert agent.poll() is None
        yield agent
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 0


def probe(command):
    """Runs the command of a probe; returns its exit code."""
    assert command[0] == "tensorcask"
    return subprocess.run([*COMMAND, *command[1:]], capture_output=True, timeout=60).returncode


def scrape(connection):
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("content-type").startswith("application/openmetrics-text")
    return answer.read().decode()


def metrics_of(folder):
    """The metrics, as the container `metrics` reads them: HTTP on the socket of the agent."""
    connection = http.client.HTTPConnection("agent")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(f"{folder}/agent.sock")
    with connection.sock:
        return scrape(connection)


def metrics_with_labels(text):
    """Names of samples, each with its labels; names without samples have none. Histograms and counters by their suffixes."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
    found = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {name + suffix: set() for suffix in suffixes.get(kind, ("",))}
    for name, labels in re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        assert name in found, name
        found[name] |= set(re.findall(r"(\w+)=\"", labels))
    return found


def save_two_steps(url):
    engine = tensorcask.Engine(url, run="deployed")
    for step in (1, 2):
        engine.save({"model": {"w": np.full(1000, step, np.float32)}}, step=step)
    engine.wait("durable", timeout=120)
    return engine


def test_the_dashboard_names_metrics_and_labels_that_the_agent_has(agent, host_memory, url):
    engine = save_two_steps(url)
    found = metrics_with_labels(metrics_of(host_memory))
    engine.finish()
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [
        (panel["title"], target["expr"], target["legendFormat"]) for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    named = set()
    for title, query, legend in queries:
        metrics = re.findall(r"\b(tensorcask_\w+)(\{[^}]*\})?", query)
        assert metrics, title
        by = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))))
        for metric, selector in metrics:
            named.add(metric)
            assert metric in found, f"{title}: the agent has no {metric}"
            wanted = set(re.findall(r"(\w+)=~", selector)) | by | set(re.findall(r"\{\{(\w+)\}\}", legend)) - {"instance"}
            if found[metric]:
                assert wanted <= found[metric], f"{title}: {metric} has the labels {sorted(found[metric])}"
            else:
                of_agent = not wanted and not metric.startswith("tensorcask_replica")
                assert of_agent or metric.startswith(tuple(f"tensorcask_{part}" for part in OF_MANY_HOSTS)), (
                    f"{title}: {metric} has no sample"
                )
    # Each gauge, counter and histogram is on the dashboard.
    families = {re.sub("_(bucket|sum|count)$", "", metric) for metric in found}
    assert families == {re.sub("_(bucket|sum|count)$", "", metric) for metric in named}
    [variable] = [entry for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
    assert label in found[metric]


def test_probes_tell_whether_the_agent_answers(agent, containers):
    probes = [containers["agent"][kind]["exec"]["command"] for kind in ("startupProbe", "livenessProbe")]
    assert [probe(command) for command in probes] == [0, 0]
    # Kubernetes ends a container with SIGTERM. The agent drains, and ends in order.
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0
    assert all(probe(command) != 0 for command in probes)


def test_the_agent_commits_what_waits_before_it_ends(agent, url):
    engine = tensorcask.Engine(url, run="deployed", on_agent_loss="fail")
    engine.save({"model": {"w": np.ones(100_000, np.float32)}}, step=1)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 0
    assert tensorcask.Store(url).steps == [1]
    engine.close()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder with the commands of the image, first in the path."""
    (tmp_path / "tensorcask").write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    shutil.copy(DEPLOY / "metrics", tmp_path / "tensorcask-metrics")
    for name in ("tensorcask", "tensorcask-metrics"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_request_gets_the_metrics_and_no_word_of_it_reaches_the_agent(agent, commands):
    def answer(request):
        told = subprocess.run(["tensorcask-metrics"], input=request, capture_output=True, timeout=60, check=True).stdout
        head, text = told.split(b"\r\n\r\n", 1)
        return head.split(b"\r\n"), text.decode()

    head, text = answer(b"GET /metrics HTTP/1.1\r\nHost: pod:9464\r\nAccept: */*\r\n\r\n")
    assert head[0] == b"HTTP/1.0 200 OK" and head[1].startswith(b"Content-Type: application/openmetrics-text")
    assert "tensorcask_agent_uptime_seconds " in text and text.endswith("# EOF\n")
    # No request, and an end in the middle of one.
    for request in (b"", b"POST /stop HTTP/1.1\r\nHost"):
        assert answer(request)[0][0] == b"HTTP/1.0 200 OK"
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0
    assert answer(b"GET /metrics HTTP/1.1\r\n\r\n")[0][0].startswith(b"HTTP/1.0 503")


def test_metrics_over_the_port(agent, commands, containers):
    if (socat := os.environ.get("SOCAT") or shutil.which("socat")) is None:
        pytest.skip("socat is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    container = containers["metrics"]
    assert container["command"] == ["socat"]
    listen = next(part["containerPort"] for part in container["ports"] if part["name"] == "metrics")
    words = [word.replace(str(listen), f"{port},bind=127.0.0.1") for word in container["args"]]
    with subprocess.Popen([socat, *words]) as proxy:
        try:
            while True:
                try:
                    text = scrape(http.client.HTTPConnection("127.0.0.1", port, timeout=60))
                    break
                except ConnectionRefusedError:
                    assert proxy.poll() is None
        finally:
            proxy.terminate()
    assert "tensorcask_agent_uptime_seconds " in text and text.endswith("# EOF\n")


def test_the_manifest_fits_the_agent(pod, containers):
    spec, agent, trainer = pod["spec"], containers["agent"], containers["trainer"]
    # Both commands of the agent are the same: that of the container, and that of the manifest.
    assert agent["args"] == json.loads(instructions("CMD")[0])
    [folder] = [entry["value"] for entry in agent["env"] if entry["name"] == "TENSORCASK_ENGINE_DIR"]
    assert {"name": "TENSORCASK_ENGINE_DIR", "value": folder} in trainer["env"]
    assert f"TENSORCASK_ENGINE_DIR={folder}" in instructions("ENV")
    # One user; the folder lies in shared memory of the pod, at one path.
    assert instructions("USER") == [f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"]
    [volume] = spec["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    for container in containers.values():
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"] and folder.startswith(mount["mountPath"] + "/")
    assert [container["name"] for container in spec["initContainers"] if container["restartPolicy"] == "Always"] == ["agent", "metrics"]
    # Shared memory counts against the limits of the containers.
    limits = sum(size(container["resources"]["limits"]["memory"]) for container in containers.values())
    assert size(volume["emptyDir"]["sizeLimit"]) < limits
    minutes = int(re.fullmatch(r"(\d+)m", agent["args"][agent["args"].index("--drain") + 1])[1])
    assert spec["terminationGracePeriodSeconds"] > 60 * minutes
    # The port of the metrics is the one that Prometheus is told.
    [port] = containers["metrics"]["ports"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    assert containers["metrics"]["args"][-2].startswith(f"TCP-LISTEN:{port['containerPort']},")
    # The socket of the agent takes orders, too.
    assert containers["metrics"]["args"][-1] == "EXEC:tensorcask-metrics" and "agent.sock" not in str(containers["metrics"])
    assert containers["metrics"]["readinessProbe"]["httpGet"] == {
        "path": pod["metadata"]["annotations"]["prometheus.io/path"],
        "port": port["name"],
    }


def size(text):
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()
    return int(number) * BYTES[unit]


def test_the_guide_shows_every_alert_with_metrics_that_exist(agent, host_memory, url):
    engine = save_two_steps(url)
    found = metrics_with_labels(metrics_of(host_memory))
    engine.finish()
    [block] = re.findall(r"^```yaml\n(groups:.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    rules = [rule for group in yaml.safe_load(block)["groups"] for rule in group["rules"]]
    assert len(rules) >= 4
    for rule in rules:
        named = re.findall(r"\btensorcask_\w+", rule["expr"])
        assert named and all(name in found for name in named), rule["alert"]
